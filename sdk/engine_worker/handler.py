"""The way of a request through an engine: cancellation, finish reason, span."""

import asyncio
import copy
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, nullcontext
from typing import Any, cast

from tandem.runtime.errors import InternalError, InvalidRequestError
from tandem.runtime.wire.messages import PrefillReport
from tandem.sdk.engine.health_check import is_probe
from tandem.sdk.engine.llm_engine import LLMEngine
from tandem.sdk.engine.types import GenerateChunk, GenerateRequest, VectorRequest
from tandem.sdk.engine_worker.prefill_stage import PrefillStage
from tandem.sdk.engine_worker.ranks import Ranks
from tandem.sdk.worker.context import Context
from tandem.sdk.worker.telemetry import request_span

logger = logging.getLogger(__name__)

_WITH_IMAGES = PrefillReport("local", "the prompt has images")


class EngineHandler:
    """The handler of an engine's endpoint: `answer` yields the engine's chunks.

    `changed` is called whenever a request begins or ends.
    """

    def __init__(self, engine: LLMEngine, changed: Callable[[], None]) -> None:
        self._engine = engine
        self._changed = changed
        self._aborts: set[asyncio.Task[None]] = set()
        self.prefill: PrefillStage | None = None  # set for decode engines
        self.ranks: Ranks | None = None  # set for engines of several data-parallel ranks
        self.num_running = 0
        self.num_answered = 0  # up to a finish reason

    def serve(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        """Return the answer to a request of any kind."""
        if isinstance(request, dict) and "kind" in request:
            return self._vectors(cast(VectorRequest, request), context)
        return self.answer(request, context)

    async def answer(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[GenerateChunk, None]:
        """Yield the chunks up to the finish reason. Raise InternalError if it is missing."""
        _check(request)
        self.num_running += 1
        self._changed()
        num_tokens = len(request["token_ids"])
        try:
            with request_span(context, "engine.generate", {"num_prompt_tokens": num_tokens}):
                if self.prefill is not None and not is_probe(request):
                    request = await self.prefill.prepare(request, context)
                with self.ranks.routed(request) if self.ranks else nullcontext(request) as routed:
                    if self.prefill is None:
                        async for chunk in self._generate(routed, context):
                            yield chunk
                        return
                    async for chunk in self._beside(self.prefill, routed, context):
                        self.prefill.begun(context)
                        if request.get("images"):
                            chunk.setdefault("prefill", _WITH_IMAGES)
                        yield chunk
        finally:
            if self.prefill is not None:
                self.prefill.ended(context)
            self.num_running -= 1
            self._changed()

    async def _beside(
        self, prefill: PrefillStage, request: GenerateRequest, context: Context
    ) -> AsyncIterator[GenerateChunk]:
        """Yield the chunks, which begin anew if a prefill that runs beside them fails."""
        leg = prefill.take_leg(context)
        is_over = False
        try:
            async with aclosing(self._generate(request, context)) as chunks:
                first = None if leg is None else await leg.first_of(chunks)
                if first is not None:
                    yield first
                if leg is None or first is not None:
                    async for chunk in chunks:
                        yield chunk
                    is_over = True
                    return
            alone: GenerateRequest = {**request}
            del alone["bootstrap_info"]
            async for chunk in self._generate(alone, context):
                yield chunk
        finally:
            if leg is not None:
                leg.end(at_once=not is_over)

    async def _generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[GenerateChunk, None]:
        undo = self._abort_when_given_up(context)
        try:
            async with aclosing(self._engine.generate(request, context)) as chunks:
                async for chunk in chunks:
                    yield chunk
                    if chunk.get("finish_reason") is not None:
                        self.num_answered += 1
                        return
        finally:
            undo()
        if context.is_stopped():
            yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
            return
        raise InternalError(f"request {context.id()}: the engine's answer has no finish_reason")

    async def _vectors(
        self, request: VectorRequest, context: Context
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the engine's vectors or scores; a caller who leaves cancels its work."""
        inputs, embeds = request.get("token_ids"), request["kind"] == "embeddings"
        if not isinstance(inputs, list) or not all(map(_are_tokens, inputs)):
            raise InvalidRequestError("token_ids: not lists of token ids", param="token_ids")
        self.num_running += 1
        self._changed()
        num_tokens = sum(map(len, inputs))
        name = "engine.embed" if embeds else "engine.score"
        work = self._engine.embed if embeds else self._engine.score
        try:
            with request_span(context, name, {"num_prompt_tokens": num_tokens}):
                task = asyncio.ensure_future(work(request, context))

                def give_up() -> None:
                    task.cancel()

                undo = context.request_context.on_stop_or_cancel(give_up, give_up)
                try:
                    found = await task
                except asyncio.CancelledError:
                    if context.is_stopped():
                        return
                    raise
                finally:
                    undo()
                    task.cancel()
                self.num_answered += 1
                yield {"embeddings" if embeds else "scores": found}
        finally:
            self.num_running -= 1
            self._changed()

    async def probe(self, payload: Mapping[str, Any]) -> None:
        """Send a health check through the engine. Raise the error of its answer."""
        async with aclosing(self.serve(copy.deepcopy(dict(payload)), Context())) as chunks:
            async for chunk in chunks:
                if chunk.get("finish_reason") == "error":
                    raise InternalError("the engine answered with an error")

    def _abort_when_given_up(self, context: Context) -> Callable[[], None]:
        """Call the engine's `abort` once, when the caller stops or leaves. Return the undo."""
        has_begun = False

        def begin() -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                task = asyncio.get_running_loop().create_task(self._abort(context))
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)

        return context.request_context.on_stop_or_cancel(begin, begin)

    async def _abort(self, context: Context) -> None:
        logger.debug("request %s is being aborted", context.id())
        try:
            await self._engine.abort(context)
        except Exception:
            logger.exception("request %s: the engine's abort failed", context.id())

    async def aborted(self) -> None:
        """Wait for all calls of the engine's `abort`."""
        while self._aborts:
            await asyncio.wait(self._aborts)


def _check(request: Any) -> None:
    if not isinstance(request, dict):
        raise InvalidRequestError("the request is not a dict", param="request")
    token_ids = request.get("token_ids")
    if not _are_tokens(token_ids):
        raise InvalidRequestError("token_ids: not a list of token ids", param="token_ids")


def _are_tokens(values: Any) -> bool:
    return isinstance(values, list) and all(type(each) is int for each in values)
