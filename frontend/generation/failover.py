"""The decode worker of one sequence, and the next one when a worker fails."""

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Literal, Protocol

import msgspec

from tandem.frontend.access.limits import Header
from tandem.frontend.catalog.catalog import ServedModel
from tandem.frontend.generation.deps import FrontendDeps
from tandem.frontend.http.exchange import header_value
from tandem.router.decision import RoutingDecision
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import (
    ConnectionLostError,
    IncompleteError,
    OverloadedError,
    ProtocolError,
    TandemError,
    UnavailableError,
)
from tandem.runtime.plane.response_stream import ResponseStream
from tandem.runtime.store.discovery import endpoint_of
from tandem.runtime.tracing.spans import CallSpan

logger = logging.getLogger(__name__)

# Another worker may succeed after these. Other errors would come again, or are the caller's own.
MIGRATABLE = (ConnectionLostError, ProtocolError, OverloadedError)
MigrationKind = Literal["new_request", "ongoing"]


class WorkerSequence(Protocol):
    """A sequence that one worker after another generates until it is complete."""

    @property
    def num_generated(self) -> int:
        """Tokens that the next worker does not have to generate again."""

    @property
    def ttft_target_s(self) -> float | None:
        """The request's own target of the first token; None: that of its worker."""

    def blocks(self, with_hashes: bool) -> tuple[int, list[bytes]]:
        """Return the number of KV blocks to prefill, and the hashes of the full ones if wanted."""

    def payload(self) -> bytes:
        """Return the encoded request for the rest of the sequence."""

    async def follow(self, stream: ResponseStream) -> None:
        """Take all that a worker sends. Ends the stream in every case."""

    async def settle(self, error: TandemError) -> bool:
        """Return True when the sequence is complete although its worker failed with `error`.

        Raises `error` when no other worker can resume the sequence.
        """


class Attempts(msgspec.Struct):
    """The workers that one sequence has tried, and the number of migrations it has left."""

    limit: int  # migrations after failures; 0: none, and no handover either
    num_migrations: int = 0
    num_handovers: int = 0  # of these, from a healthy worker that had brought the answer forward
    _failed: set[str] = set()  # instance ids; not asked again
    _gave_up: set[str] = set()  # perhaps healthy, but asked again only as a last resort

    def failed(self, instance_id: str, error: TandemError) -> None:
        """Note that this worker did not complete the sequence.

        A worker that was lost is healthy once the catalog can reach it again.
        """
        kept = self._gave_up if isinstance(error, ConnectionLostError) else self._failed
        kept.add(instance_id)

    def begun(self) -> None:
        """Note that a worker answers: the workers that failed before may be healthy by now."""
        self._failed.clear()
        self._gave_up.clear()

    def eligible(self, instance_ids: Iterable[str]) -> list[str]:
        """Return the instances that have not been tried, else those that gave up once."""
        if not self._failed and not self._gave_up:
            return list(instance_ids)
        left = [each for each in instance_ids if each not in self._failed]
        return [each for each in left if each not in self._gave_up] or left

    def allows(self, *, handover: bool) -> bool:
        """Return True when the limit allows another migration; handovers do not count.

        Every handover brings tokens, so the answer ends.
        """
        num_failures = self.num_migrations - self.num_handovers
        return num_failures < self.limit or (handover and self.limit > 0)


def is_worker_at_fault(error: TandemError) -> bool:
    """Return True when the worker should get no requests for a while.

    An overloaded worker is healthy. So is one that gave up a single stream: if it is about to
    stop, it refuses the next one.
    """
    if isinstance(error, OverloadedError):
        return isinstance(error, UnavailableError)
    return not isinstance(error, IncompleteError)


def decision_headers(decision: RoutingDecision) -> list[Header]:
    """Return the headers that name the decode worker of an answer."""
    return [
        (b"x-tandem-decode-instance", header_value(decision.instance_id)),
        (b"x-tandem-decode-reason", header_value(decision.reason)),
    ]


class Failover:
    """Runs one sequence on a worker, and on others when workers fail."""

    def __init__(
        self,
        request_id: str,
        model: ServedModel,
        context: RequestContext,
        deps: FrontendDeps,
        owner: str,
        named: str = "",
    ) -> None:
        self._request_id = request_id
        self._model = model
        self._context = context
        self._deps = deps
        self._owner = owner  # the name of the API key; empty without keys
        limit = model.card.migration_limit
        self._attempts = Attempts(deps.config.migration_limit if limit is None else limit)
        self._has_begun = False
        self._call: CallSpan | None = None  # the last one
        self._sent_s = 0.0  # perf_counter
        self.decision = RoutingDecision("", 0, "")  # the worker that was asked last
        self._named = named  # the worker to ask first, if it is a candidate; empty: the best one

    @property
    def instance_id(self) -> str:
        """The worker that was asked last; empty before there is one."""
        return self.decision.instance_id

    @property
    def num_migrations(self) -> int:
        """Workers that the sequence has left for another one."""
        return self._attempts.num_migrations

    def begun(self) -> None:
        """Note that the worker asked last has sent its first answer."""
        self._has_begun = True
        self._attempts.begun()
        self._deps.router.prefilled(self._request_id)
        if self.decision.predicted_ms:
            error = (time.perf_counter() - self._sent_s) * 1e3 / self.decision.predicted_ms
            self._deps.metrics.prediction_error.labels(self._model.card.name).observe(error)

    async def run(self, sequence: WorkerSequence) -> None:
        """Have the sequence generated. Raises the error of the last worker that was tried."""
        if not (candidates := await self._candidates_for(sequence)):
            raise UnavailableError(f"no worker serves {self._model.card.name!r} now")
        while True:
            num_before = sequence.num_generated
            self._route(sequence, candidates)
            try:
                try:
                    with self._next_call() as call:
                        await sequence.follow(await self._open(sequence, call.headers))
                    return
                finally:
                    self._deps.router.finished(self._request_id)
            except MIGRATABLE as error:
                self._note_failure(sequence, error)
                if await sequence.settle(error):
                    return
                handover = isinstance(error, IncompleteError) and (
                    sequence.num_generated > num_before
                )
                is_allowed = self._attempts.allows(handover=handover)
                if not is_allowed or not (candidates := await self._candidates_for(sequence)):
                    raise self._last_error(error) from error
            self._attempts.num_migrations += 1
            self._attempts.num_handovers += handover
            kind: MigrationKind = "ongoing" if sequence.num_generated else "new_request"
            self._deps.metrics.migrations.add(self._model.card.name, kind)

    def _route(self, sequence: WorkerSequence, candidates: list[str]) -> None:
        router, catalog = self._deps.router, self._deps.catalog
        num_blocks, hashes = sequence.blocks(router.heeds_prefix(candidates))
        target_s = sequence.ttft_target_s
        named, self._named = self._named if self._named in candidates else "", ""
        self.decision = router.choose(candidates, hashes, num_blocks, target_s, named)
        # Asked of the chosen one alone: a heartbeat is seldom late.
        if len(candidates) > 1 and catalog.is_quiet(self._model, self.instance_id):
            others = self._attempts.eligible(catalog.candidates(self._model))
            self.decision = router.choose(others or candidates, hashes, num_blocks, target_s)
        router.started(self._request_id, self.decision, num_blocks)
        self._sent_s = time.perf_counter()

    def _next_call(self) -> CallSpan:
        decision = self.decision
        facts = {"decode_instance": decision.instance_id, "decode_reason": decision.reason}
        self._call = CallSpan(self._context.headers, self._call, facts)
        return self._call

    async def _open(self, sequence: WorkerSequence, headers: dict[str, str]) -> ResponseStream:
        instance = self._deps.catalog.instance(self._model, self.instance_id)
        if instance is None:
            raise ConnectionLostError(f"instance {self.instance_id} has left")
        return await self._deps.client.open(
            instance.address, endpoint_of(instance), sequence.payload(), self._context, headers
        )

    def _candidates(self) -> list[str]:
        """Return the instances to choose from; troubled ones only where no other is left."""
        catalog, eligible = self._deps.catalog, self._attempts.eligible
        candidates = eligible(catalog.untroubled(self._model))
        return candidates or eligible(catalog.reachable(self._model))

    def _note_failure(self, sequence: WorkerSequence, error: TandemError) -> None:
        self._attempts.failed(self.instance_id, error)
        if is_worker_at_fault(error):
            self._deps.catalog.exclude(self.instance_id, self._deps.config.exclude_s)
        logger.warning(
            "request %s: worker %s failed after %d tokens: %s",
            self._request_id,
            self.instance_id,
            sequence.num_generated,
            error,
        )

    def _last_error(self, error: TandemError) -> TandemError:
        """Return UnavailableError if no worker ever answered, else the worker's own error."""
        if not self._has_begun and isinstance(error, ConnectionLostError):
            return UnavailableError(f"no worker of {self._model.card.name!r} answers now")
        return error

    async def _candidates_for(self, sequence: WorkerSequence) -> list[str]:
        """Return the workers that can take the sequence, perhaps after a wait for one."""
        if candidates := self._candidates():
            return candidates
        wait_s, waiting = self._patience_s(sequence), self._deps.waiting
        is_new = sequence.num_generated == 0
        if wait_s <= 0 or (is_new and not waiting.take(1, self._owner)):
            return []
        logger.warning(
            "request %s: no worker can take it; waiting up to %.1f s for one to return",
            self._request_id,
            wait_s,
        )
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._candidate_appeared()
        finally:
            if is_new:
                waiting.give_back(1, self._owner)
        return self._candidates()

    def _patience_s(self, sequence: WorkerSequence) -> float:
        """Return the time for which the sequence may wait for a worker."""
        config = self._deps.config
        if sequence.num_generated:
            return config.migration_wait_s
        absent_s = self._deps.catalog.absent_s(self._model)
        return 0.0 if absent_s is None else config.return_wait_s - absent_s

    async def _candidate_appeared(self) -> None:
        """Wait until there is a candidate, or none can come because another variant is in force.

        Raises the context's error when the request ends.
        """
        changed = asyncio.Event()
        with ExitStack() as stack:
            stack.callback(self._context.on_cancel(changed.set))
            stack.callback(self._deps.catalog.subscribe(changed.set))
            while not self._candidates() and self._deps.catalog.is_in_force(self._model):
                self._context.raise_if_done()
                await changed.wait()
                changed.clear()
