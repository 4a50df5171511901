"""Carries out a plan: each choice on a decode worker, its tokens to the client as they come."""

import asyncio
import logging
import re
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import msgspec

from tandem.frontend.catalog import Catalog
from tandem.frontend.choice_text import ChoiceText
from tandem.frontend.config import FrontendConfig
from tandem.frontend.exchange import Exchange, Header
from tandem.frontend.metrics import FrontendMetrics, HistogramChild
from tandem.frontend.migration import (
    MIGRATABLE,
    Attempts,
    MigrationKind,
    continued,
    is_worker_at_fault,
)
from tandem.frontend.openai.responses import ChoiceCourse, Usage, usage
from tandem.frontend.plan import Choice, Plan
from tandem.router.policy import Router, RoutingDecision
from tandem.runtime.block_hash import block_hashes
from tandem.runtime.discovery import endpoint_of
from tandem.runtime.errors import (
    ConnectionLostError,
    IncompleteError,
    ProtocolError,
    TandemError,
    UnavailableError,
)
from tandem.runtime.messages import (
    GenerateRequest,
    PrefillReport,
    TokenDelta,
    TokenLogprobs,
    encode,
)
from tandem.runtime.plane.client import RequestClient, ResponseStream

logger = logging.getLogger(__name__)

_MAX_HASHED_BLOCKS = 2048  # of a prompt; hashing more would hold up the streams for milliseconds
_UNPRINTABLE = re.compile(r"[^ -~]")
_decode_delta = msgspec.msgpack.Decoder(TokenDelta).decode


@dataclass(slots=True)
class Services:
    """What every generation needs of its process."""

    config: FrontendConfig
    catalog: Catalog
    client: RequestClient
    router: Router
    metrics: FrontendMetrics


@dataclass(slots=True)
class ChoiceRun:
    """A choice being generated. It outlives the workers that fail it; the next one goes on."""

    choice: Choice
    text: ChoiceText
    attempts: Attempts
    said: list[int] = field(default_factory=list)  # tokens of the answer so far
    has_begun: bool = False  # a worker has answered, and `on_first` was told
    instance_id: str = ""  # of the worker that began it; until then, of the one that was asked
    report: PrefillReport | None = None  # of the worker that began it
    timeline_ms: dict[str, float] | None = None  # the whole, where one worker did it all
    last_token_s: float = 0.0  # perf_counter
    parts: list[str] = field(default_factory=list)  # of the text, when it is not streamed
    token_ids: list[int] = field(default_factory=list)  # those with logprobs
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Generation(ABC):
    """One request's choices; subclasses say what becomes of the tokens."""

    def __init__(self, plan: Plan, exchange: Exchange, services: Services) -> None:
        self.plan = plan
        self.exchange = exchange
        self.services = services
        self.runs = [self._new_run(choice) for choice in plan.choices]
        self.first_token_s = 0.0  # perf_counter; 0 before it
        self._gaps: HistogramChild = services.metrics.inter_token_latency.of(plan.head.model)

    async def run(self) -> None:
        """Generate all choices and answer. The first error ends all of them and is raised."""
        if len(self.runs) == 1:
            await self._run_choice(0)
        else:
            await self._run_choices()

    async def on_first(self, run: ChoiceRun) -> None:
        """A choice's first tokens have come; its report is set."""

    @abstractmethod
    def on_deltas(self, run: ChoiceRun, deltas: list[TokenDelta]) -> bytes:
        """Take a choice's tokens; returns what is to be sent now."""

    async def on_last(self, run: ChoiceRun, body: bytes) -> None:
        """A choice has ended; `body` is what `on_deltas` returned last, not sent yet."""

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, over all choices."""
        return sum(run.text.num_tokens for run in self.runs)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in a prefix cache, each prompt counted once."""
        n = len(self.runs) // len(self.plan.prompts)
        reports = [run.report for run in self.runs[::n]]
        return sum(report.num_cached_tokens for report in reports if report)

    def usage(self) -> Usage:
        """The token counts of the response."""
        return usage(self.plan.num_prompt_tokens, self.num_tokens, self.num_cached_tokens)

    def headers(self, run: ChoiceRun) -> list[Header]:
        """Where the prompt of this choice was computed, and why."""
        headers = [(b"x-tandem-decode-instance", _header_value(run.instance_id))]
        if run.report is not None:
            headers.append((b"x-tandem-prefill", run.report.place.encode()))
            headers.append((b"x-tandem-prefill-reason", _header_value(run.report.reason)))
        return headers + self.exchange.id_headers(self.plan.context.id)

    def course(self, run: ChoiceRun) -> ChoiceCourse | msgspec.UnsetType:
        """What a finished choice tells of itself, if its caller asked.

        Of one that a stop string ended, or that several workers answered, that is its course up to
        the first token only.
        """
        if not self.plan.wants_timeline or run.report is None:
            return msgspec.UNSET
        return ChoiceCourse(run.report.place, run.timeline_ms or run.report.timeline_ms)

    def _new_run(self, choice: Choice) -> ChoiceRun:
        stops = self.plan.body.stop_strings
        factory = self.plan.model.text.detokenizers
        text = ChoiceText(factory, stops, choice.request.stop.min_tokens)
        limit = self.plan.model.card.migration_limit
        if limit is None:
            limit = self.services.config.migration_limit
        return ChoiceRun(choice, text, Attempts(limit))

    async def _run_choices(self) -> None:
        context = self.plan.context
        errors: list[BaseException] = []

        async def run_one(index: int) -> None:
            try:
                await self._run_choice(index)
            except BaseException as error:
                errors.append(error)
                context.cancel("another choice of this request failed")

        await asyncio.gather(*(run_one(index) for index in range(len(self.runs))))
        if errors:
            raise errors[0]

    async def _run_choice(self, index: int) -> None:
        """On another worker when one fails, from behind what was said already."""
        run = self.runs[index]
        while True:
            decision = self._route(run)
            if not run.has_begun:
                run.instance_id = decision.instance_id
            try:
                await self._attempt(run, decision)
                return
            except MIGRATABLE as error:
                self._note_failure(run, decision.instance_id, error)
                if len(run.said) >= run.choice.request.stop.max_tokens:
                    await self._end_by_length(run)
                    return
                if not run.attempts.has_more or not await self._has_successor(run):
                    raise self._nobody_left(run, error) from error
            run.attempts.num_migrations += 1
            kind: MigrationKind = "ongoing" if run.said else "new_request"
            metrics = self.services.metrics
            metrics.count(metrics.migrations, self.plan.head.model, kind)

    def _note_failure(self, run: ChoiceRun, instance_id: str, error: TandemError) -> None:
        run.attempts.failed(instance_id, error)
        if is_worker_at_fault(error):
            self.services.catalog.exclude(instance_id, self.services.config.exclude_s)
        logger.warning(
            "request %s: worker %s failed it after %d tokens: %s",
            run.choice.request.request_id,
            instance_id,
            len(run.said),
            error,
        )

    def _nobody_left(self, run: ChoiceRun, error: TandemError) -> TandemError:
        """A worker that never answered was not there; one that broke off says so itself."""
        if not run.has_begun and isinstance(error, ConnectionLostError):
            return UnavailableError(f"no worker of {self.plan.head.model!r} answers now")
        return error

    async def _has_successor(self, run: ChoiceRun) -> bool:
        """Whether a worker can go on with the choice; what has begun waits until one comes."""
        if run.said and not self._candidates(run):
            wait_s = self.services.config.migration_wait_s
            logger.warning(
                "request %s: nobody to go on; waiting up to %g s for a worker",
                run.choice.request.request_id,
                wait_s,
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._candidate_registered(run)
        return bool(self._candidates(run))

    async def _candidate_registered(self, run: ChoiceRun) -> None:
        """Returns when the choice has somewhere to go; raises the context's error when it ends."""
        context, changed = self.plan.context, asyncio.Event()
        with ExitStack() as stack:
            stack.callback(context.on_cancel(changed.set))
            stack.callback(self.services.catalog.subscribe(changed.set))
            while not self._candidates(run):
                context.raise_if_done()
                await changed.wait()
                changed.clear()

    def _candidates(self, run: ChoiceRun) -> list[str]:
        """Where the choice can go now. A worker in doubt is better than the end of an answer."""
        catalog, model = self.services.catalog, self.plan.model
        found = run.attempts.eligible(catalog.candidates(model))
        if not found and run.instance_id:  # it was somewhere already
            found = run.attempts.eligible(catalog.members(model))
        return found

    def _route(self, run: ChoiceRun) -> RoutingDecision:
        candidates = self._candidates(run)
        if not candidates:
            raise UnavailableError(f"no worker serves {self.plan.head.model!r} now")
        block_size = self.plan.model.card.block_size
        request, router = run.choice.request, self.services.router
        prompt = run.choice.prompt.token_ids
        hashes: list[bytes] = []
        if router.heeds_prefix(candidates):
            token_ids = (prompt + run.said)[: _MAX_HASHED_BLOCKS * block_size]
            hashes = block_hashes(token_ids, block_size, salt=request.cache_salt)
        num_blocks = -(-(len(prompt) + len(run.said)) // block_size)
        decision = router.choose(candidates, hashes, num_blocks)
        router.started(request.request_id, decision, num_blocks)
        return decision

    async def _attempt(self, run: ChoiceRun, decision: RoutingDecision) -> None:
        request = continued(run.choice.request, run.said)
        try:
            stream = await self._open(request, decision.instance_id)
            try:
                await self._follow(run, stream)
            except StopAsyncIteration:
                raise IncompleteError("the worker ended a sequence without a reason") from None
            except msgspec.MsgspecError as error:
                raise ProtocolError(f"the worker sent a malformed delta: {error}") from error
            finally:
                if run.text.finish_reason is None or run.text.is_stopped:
                    stream.cancel()
        finally:
            self.services.router.finished(request.request_id)

    async def _follow(self, run: ChoiceRun, stream: ResponseStream) -> None:
        """The hot loop: all that has come goes out in one write."""
        send = self.exchange.send
        text, said = run.text, run.said
        items = await stream.take()
        await self._begin(run, _decode_delta(items[0]))
        while True:
            num_tokens = text.num_tokens
            deltas = [_decode_delta(item) for item in items]
            for delta in deltas:
                said += delta.token_ids
            was_given_up = deltas[-1].finish_reason == "cancelled"
            if was_given_up:
                deltas[-1] = msgspec.structs.replace(deltas[-1], finish_reason=None)
            body = self.on_deltas(run, deltas)
            if num_tokens:
                self._note_gap(run, text.num_tokens - num_tokens)
            if text.finish_reason is not None:
                break
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if was_given_up:
                raise IncompleteError("the worker cancelled the sequence")
            items = await stream.take()
        if run.attempts.num_migrations == 0:
            run.timeline_ms = deltas[-1].timeline_ms
        await self.on_last(run, body)

    async def _open(self, request: GenerateRequest, instance_id: str) -> ResponseStream:
        instance = self.services.catalog.instance(self.plan.model, instance_id)
        if instance is None:
            raise ConnectionLostError(f"instance {instance_id} has left")
        context = self.plan.context
        deadline_ms = int(context.remaining_s() * 1e3)
        payload = encode(msgspec.structs.replace(request, deadline_ms=deadline_ms))
        return await self.services.client.open(
            instance.address, endpoint_of(instance), payload, context
        )

    async def _begin(self, run: ChoiceRun, delta: TokenDelta) -> None:
        """A worker's first delta: of the choice, or of the rest of it."""
        now = time.perf_counter()
        metrics, model = self.services.metrics, self.plan.head.model
        self.services.router.prefilled(run.choice.request.request_id)
        run.attempts.begun()
        if run.said:
            metrics.migration_gap.of(model).observe(now - run.last_token_s)
            return
        run.last_token_s = now
        if run.has_begun:
            return
        run.has_begun = True
        self.first_token_s = self.first_token_s or now
        run.report = delta.prefill
        if delta.prefill is not None:
            metrics.count(metrics.prefills, model, delta.prefill.place)
        await self.on_first(run)

    async def _end_by_length(self, run: ChoiceRun) -> None:
        """Its worker was lost when all was said but that this is the end."""
        await self.on_last(run, self.on_deltas(run, [TokenDelta([], "length")]))

    def _note_gap(self, run: ChoiceRun, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        now = time.perf_counter()
        self._gaps.observe((now - run.last_token_s) / num_tokens, num_tokens)
        run.last_token_s = now


def _header_value(text: str) -> bytes:
    """Printable ASCII only: a header has no room for anything else."""
    return _UNPRINTABLE.sub("?", text).encode()
