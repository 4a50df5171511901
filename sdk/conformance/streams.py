"""The engine under examination, and the answers that are read from it."""

import asyncio
import inspect
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from tandem.runtime.tasks import ends_within
from tandem.sdk.conformance.errors import ConformanceError, Failure
from tandem.sdk.engine.disaggregation import DisaggregationMode
from tandem.sdk.engine.llm_engine import LLMEngine
from tandem.sdk.engine.types import EngineConfig, GenerateRequest
from tandem.sdk.worker.context import Context

T = TypeVar("T")

_POLL_S = 0.02  # is_quiescent() can only be polled
# After this long, a task that ignores its cancellation is left running.
_GRACE_S = 1.0


@dataclass(frozen=True)
class ConformanceSettings:
    """The requests to the engine and the time it may take; the defaults suit real models.

    Requests to a decode engine carry `prefill_result`. `skip` names checks to leave out.
    """

    prompt_token_ids: tuple[int, ...] = tuple(range(1, 9))
    prompt_text: str = "Count from one to ten."
    max_tokens: int = 16
    long_max_tokens: int = 10_000  # of the answers that are cancelled
    num_concurrent: int = 8
    num_drained: int = 4
    num_abandoned: int = 128  # at most; else one more than the engine has room for
    start_timeout_s: float = 600.0
    generate_timeout_s: float = 60.0  # one answer of `max_tokens`
    cancel_timeout_s: float = 2.0  # from the cancellation to the last chunk
    drain_timeout_s: float = 30.0
    cleanup_timeout_s: float = 30.0
    prefill_result: dict[str, Any] | None = None
    skip: frozenset[str] = frozenset()


async def bounded(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Return the result of `work`. Raise TimeoutError after `timeout_s`, also when it never ends.

    Errors of `work` propagate. A CancelledError that `work` raises itself becomes a RuntimeError.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_GRACE_S)
        raise TimeoutError(f"it did not return within {timeout_s:g} s")
    if task.cancelled():
        raise RuntimeError("it raised CancelledError although it was not cancelled")
    return task.result()


@contextmanager
def failing_as(failure: Failure, doing: str) -> Iterator[None]:
    """Turn any error of the block into `failure`; its message begins with `doing`."""
    try:
        yield
    except Exception as error:
        raise failure.error(f"{doing} {described(error)}") from error


def described(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, ConformanceError):
        return f"{error.name}: {error.message}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class NotApplicable(Exception):
    """The check has no meaning for this engine; the message says why."""


class Stream:
    """One answer, read chunk by chunk in a task of its own, as a worker reads it.

    It has ended when the generator has returned, has raised (`error`), or was closed after `drop`.
    """

    def __init__(self, engine: LLMEngine, request: GenerateRequest) -> None:
        self.request = request
        self.context = Context()
        self.chunks: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        self._engine = engine
        self._is_dropped = False
        self._has_chunk = asyncio.Event()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            answer = cast(Any, self._engine.generate(self.request, self.context))
            if not inspect.isasyncgen(answer):
                if inspect.iscoroutine(answer):
                    answer.close()
                raise TypeError(
                    f"generate() returned {type(answer).__name__}, not an async generator: write "
                    "`async def` with `yield`"
                )
            await self._read_chunks(answer)
        except BaseException as error:  # also GeneratorExit, by which engines give a stream up
            self.error = error
            if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit):
                raise
        finally:
            self._has_chunk.set()

    async def _read_chunks(self, answer: Any) -> None:
        max_tokens = self.request.get("stop_conditions", {}).get("max_tokens")
        try:
            async for chunk in answer:
                self.chunks.append(chunk)
                self._has_chunk.set()
                if self._is_dropped:
                    break
                if max_tokens is not None and self.num_tokens > max_tokens:
                    raise Failure.MaxTokensExceeded.error(
                        f"max_tokens was {max_tokens}, and {self.num_tokens} tokens were yielded"
                    )
                await asyncio.sleep(0)  # an engine that never waits must not block the kit
        finally:
            await answer.aclose()

    @property
    def num_tokens(self) -> int:
        """Tokens yielded so far."""
        counts = (chunk.get("token_ids") for chunk in self.chunks if isinstance(chunk, dict))
        return sum(len(ids) for ids in counts if isinstance(ids, list))

    @property
    def finish_reason(self) -> str | None:
        """The last chunk's finish reason, if it has one."""
        last = self.chunks[-1] if self.chunks else None
        return last.get("finish_reason") if isinstance(last, dict) else None

    def drop(self) -> None:
        """Close the generator at its next chunk, as a worker does when its caller has left."""
        self._is_dropped = True

    async def first(self, timeout_s: float) -> bool:
        """Wait for the first chunk or the end; return False after `timeout_s`."""
        return await ends_within(self._has_chunk.wait(), timeout_s)

    async def ended(self, timeout_s: float) -> bool:
        """Wait for the end; return False after `timeout_s`."""
        await asyncio.wait({self.task}, timeout=timeout_s)
        return self.task.done()

    async def whole(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return all chunks. Raise GenerateFailed, or the ConformanceError of the reading task."""
        if not await self.ended(timeout_s):
            raise Failure.GenerateFailed.error(
                f"an answer did not end within {timeout_s:g} s; it had {len(self.chunks)} chunks"
            )
        if isinstance(self.error, ConformanceError):
            raise self.error
        if self.error is not None:
            raise Failure.GenerateFailed.error(
                f"generate() raised {described(self.error)} after {len(self.chunks)} chunks"
            ) from self.error
        return self.chunks

    async def close(self) -> None:
        """Stop reading, whatever the engine does."""
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=_GRACE_S)


@dataclass
class Subject:
    """The engine under examination, its config, and its open streams."""

    engine: LLMEngine
    settings: ConformanceSettings
    mode: DisaggregationMode = DisaggregationMode.AGGREGATED
    is_text: bool = False  # reads and yields text, not token ids
    config: EngineConfig | None = None  # once started
    streams: list[Stream] = field(default_factory=list)

    @property
    def is_prefill(self) -> bool:
        return self.mode is DisaggregationMode.PREFILL

    def ask(self, max_tokens: int, *, logprobs: int | None = None) -> Stream:
        """Begin to read an answer of `max_tokens` tokens."""
        settings = self.settings
        request = GenerateRequest(
            token_ids=[] if self.is_text else list(settings.prompt_token_ids),
            model=self.config.model if self.config is not None else "",
            request_id=f"conformance-{len(self.streams)}",
            sampling_options={"temperature": 0.0},
            stop_conditions={"max_tokens": max_tokens, "ignore_eos": True},
            output_options={} if logprobs is None else {"logprobs": logprobs},
        )
        if self.is_text:
            request["messages"] = [{"role": "user", "content": settings.prompt_text}]
        if settings.prefill_result is not None:
            request["prefill_result"] = settings.prefill_result
        return self.ask_with(request)

    def ask_with(self, request: GenerateRequest) -> Stream:
        """Begin to read the answer to `request`."""
        stream = Stream(self.engine, request)
        self.streams.append(stream)
        return stream

    def num_long_tokens(self) -> int:
        """Return the length of an answer that is long enough to be cancelled."""
        length = self.config.context_length if self.config is not None else None
        longest = self.settings.long_max_tokens
        if length is not None:
            longest = min(longest, length - len(self.settings.prompt_token_ids))
        return longest

    async def at_rest(self) -> None:
        """Wait while the engine reports that transfers are under way."""
        while await self.engine.is_quiescent() is False:
            await asyncio.sleep(_POLL_S)

    async def close_streams(self) -> None:
        """Close the streams that a check left running."""
        for stream in self.streams:
            await stream.close()
        self.streams.clear()
