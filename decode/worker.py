"""The decode role: generate tokens, and decide for each prompt where it is computed."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Set
from dataclasses import replace

import msgspec

from tandem.decode.admission import Decision, PlacementCause, PrefillSide, decide
from tandem.decode.config import DisaggConfig
from tandem.decode.handoffs import RemotePrefills
from tandem.decode.kv_events import KvEventPublisher
from tandem.decode.metrics import DecodeMetrics
from tandem.decode.model_card import model_card
from tandem.decode.requests import ActiveRequest
from tandem.decode.thresholds import LiveThresholds
from tandem.decode.transfer_cost import TransferCost
from tandem.engine.engine import Engine
from tandem.engine.outputs import LoadStats, SequenceOutput
from tandem.queue.prefill_queue import QueueDepth
from tandem.router.predict import PlaceLoad
from tandem.runtime.address import EndpointAddress
from tandem.runtime.context import RequestContext
from tandem.runtime.discovery import (
    config_prefix,
    register_model,
    register_transfer,
    watch_instances,
)
from tandem.runtime.errors import (
    IncompleteError,
    InternalError,
    InvalidRequestError,
    ServiceError,
    TandemError,
    UnavailableError,
)
from tandem.runtime.events import load_subject
from tandem.runtime.messages import DECODE_ERRORS, LoadReport, ModelFiles, RoleName, encode
from tandem.runtime.model_files import MODEL_FILES_ENDPOINT
from tandem.runtime.plane.server import Responder
from tandem.runtime.printable import one_line
from tandem.runtime.tasks import keep_running
from tandem.worker.role import Details
from tandem.worker.worker import Worker

logger = logging.getLogger(__name__)

_LOAD_REPORT = msgspec.msgpack.Decoder(LoadReport)
MAX_ERROR_BYTES = 200  # of a stranger's bytes, in a log line
REPORT_LIFETIME_S = 2.0  # of another worker's load
NO_JOBS = QueueDepth(0, 0, 0, 0)
LOOK_INTERVAL_S = 0.25  # between looks at the depth of the queue and at the own load


class DecodeRole:
    """Generates tokens for frontends, and decides for each prompt where it is computed."""

    name: RoleName = "decode"

    def __init__(self, worker: Worker, disagg: DisaggConfig, model_files: ModelFiles) -> None:
        self._worker = worker
        self._disagg = disagg
        self._model_files = model_files
        self._model_name = worker.settings.model_name
        self._namespace = worker.settings.runtime.namespace
        self.engine, self.loop = worker.engine, worker.loop
        self.node, self.queue = worker.node, worker.queue
        self.endpoint = EndpointAddress(self._namespace, "decode", "generate")
        self.metrics = DecodeMetrics(self._model_name)
        self.side = PrefillSide(transfer=TransferCost(worker.group.layout.token_bytes))
        self.active: dict[str, ActiveRequest] = {}
        self._queue_depth = NO_JOBS
        self._num_reserved = 0  # all handoffs so far; counted on the engine thread
        self._num_reserved_tokens = 0  # of these
        self._others: dict[str, tuple[float, LoadReport]] = {}  # by instance, when they came
        self._is_draining = False
        self._card_key = ""
        self._aio = asyncio.get_running_loop()

    # ---- lifecycle ----------------------------------------------------------------------------

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Serve the endpoints of requests, of handoffs and of what frontends fetch."""
        node = self.node
        await self._watch_cluster(stack)
        self._publish_cache()
        await self._start_remote(stack)
        stack.push_async_callback(self._end_requests)
        node.server.register(str(self.endpoint), self._generate)
        for endpoint, handler in (
            (MODEL_FILES_ENDPOINT, self._send_model_files),
            ("kv_snapshot", self._send_kv_snapshot),
        ):
            node.server.register(endpoint, handler)
        stack.callback(keep_running("the look at queue and load", self._look_around).cancel)

    async def take_up(self) -> None:
        """Publish the model, and accept requests."""
        self._is_draining = False
        card = model_card(
            self.node,
            self.endpoint,
            self.engine,
            self._model_files,
            self._worker.weights_digest,
            supports_grammar=self._worker.grammars is not None,
        )
        self._card_key = await register_model(self.node, self._namespace, card)

    async def drain(self, patience_s: float | None = None) -> None:
        """Take no new request; running requests go on, up to `patience_s` where it is given.

        The endpoints of handoffs stay: remote prefills of running requests need them.
        """
        self._is_draining = True
        await self.node.take_back(self._card_key)
        try:
            async with asyncio.timeout(patience_s):
                while self.active:
                    await asyncio.wait([active.done for active in self.active.values()])
        except TimeoutError:
            self._hand_over("the decode worker has another role now")

    async def _end_requests(self) -> None:
        self._hand_over("the decode worker stopped")

    def _hand_over(self, reason: str) -> None:
        """Fail the requests that are left, so that their callers resume elsewhere."""
        for active in list(self.active.values()):
            active.fail(IncompleteError(reason))

    async def _watch_cluster(self, stack: contextlib.AsyncExitStack) -> None:
        discovery, namespace = self.node.discovery, self._namespace
        view = discovery.watch(config_prefix(namespace))
        stack.push_async_callback(view.close)
        self._prefill_instances = watch_instances(discovery, namespace, "prefill")
        stack.push_async_callback(self._prefill_instances.close)
        await view.ready()
        await self._prefill_instances.ready()
        self.thresholds = LiveThresholds(self._disagg, view, namespace, self._model_name)
        stack.push_async_callback(
            await self.node.events.subscribe(load_subject(namespace), self._on_load)
        )

    def _publish_cache(self) -> None:
        node = self.node
        self._cache = KvEventPublisher(node.events, self._namespace, node.instance_id, node.epoch)
        self.engine.block_pool.on_stored = self._cache.stored
        self.engine.block_pool.on_removed = self._cache.removed

    async def _start_remote(self, stack: contextlib.AsyncExitStack) -> None:
        worker = self._worker
        self.remote = RemotePrefills(
            node=self.node,
            queue=self.queue,
            group=worker.group,
            loop=self.loop,
            thresholds=lambda: self.thresholds.current,
            transfer=worker.settings.transfer,
            deployment=worker.deployment,
            prefill_instances=self._prefill_instances.items,
            metrics=self.metrics,
            transfer_cost=self.side.transfer,
            vocab_size=self.engine.runner.model_config.vocab_size,
            own_prompts=worker.own_prompts,
        )
        worker.take_back = self.remote.take_back
        stack.push_async_callback(self.remote.close)
        self.remote.register(self.node.server)
        worker.on_notification = self.remote.on_notification
        # Not by `node`, which withdraws its keys at once: a draining worker is still written to.
        metadata = worker.group.metadata(
            self.node.server.address, self._model_name, worker.deployment
        )
        await register_transfer(self.node.discovery, self._namespace, metadata)

    # ---- requests -----------------------------------------------------------------------------

    async def _generate(
        self, payload: bytes, context: RequestContext, responder: Responder
    ) -> None:
        active = ActiveRequest.from_wire(
            payload,
            context,
            responder,
            model=self._model_name,
            vocab_size=self.engine.runner.model_config.vocab_size,
        )
        active.seq.matcher = await self._worker.matcher_of(active.request.grammar, active.seq)
        if self._is_draining:
            raise UnavailableError(f"{self.node.instance_id} is draining")
        request_id = active.request.request_id
        if request_id in self.active:
            raise InvalidRequestError(f"request {request_id} is running already")
        self.active[request_id] = active
        self._worker.own_prompts.add(request_id)
        forget = context.on_cancel(
            lambda: active.fail(context.error() or InternalError("cancelled without a reason"))
        )
        try:
            self.loop.post(lambda engine: self._place(engine, active))
            await active.done
        finally:
            forget()
            del self.active[request_id]
            self._worker.own_prompts.discard(request_id)
            self._finished(active)

    def _place(self, engine: Engine, active: ActiveRequest) -> None:
        """Decide, then queue the sequence or reserve its blocks. On the engine thread."""
        seq = active.seq
        if active.done.done():
            return
        config = self.thresholds.current
        engine.limit_steps(config.itl_target_ms)
        try:
            num_cached = engine.prefix_hit(seq)
            decision = decide(
                config,
                seq.num_tokens - num_cached,
                self._prefill_side(engine),
                num_cached_tokens=num_cached,
                placement=active.request.prefill_place,
                prompt_logprobs=seq.prompt_scores is not None,
            )
            if decision.place == "remote":
                reservation = engine.reserve(seq)
                if reservation is not None:
                    active.decision = decision
                    self._num_reserved += 1
                    self._num_reserved_tokens += seq.num_tokens - num_cached
                    self._aio.call_soon_threadsafe(self.remote.start, active, reservation)
                    return
                decision = Decision("local", PlacementCause.NO_BLOCKS)
            active.decision = decision
            engine.add(seq)
        except TandemError as error:
            self._aio.call_soon_threadsafe(active.fail, error)

    def _prefill_side(self, engine: Engine) -> PrefillSide:
        side, me = self.side, self.node.instance_id
        excluded = {me, *self.remote.excluded()}
        helpers = {
            each.instance_id
            for each in list(self._prefill_instances.items.values())
            if each.deployment == self._worker.deployment and each.instance_id not in excluded
        }
        side.num_instances = len(helpers)
        side.queue_connected = self.queue.connected
        # Counted here, not at the queue: a burst is decided before its first ticket is published.
        num_unclaimed = self._num_reserved - self.remote.num_taken
        side.num_queued_jobs = max(self._queue_depth.num_jobs, num_unclaimed)
        num_open_tokens = self._num_reserved_tokens - self.remote.num_computed_tokens
        side.num_ticket_tokens = max(self._queue_depth.num_tokens, num_open_tokens)
        side.here = _place_here(engine.load())
        side.others = self._other_places(helpers)
        return side

    def _other_places(self, helpers: Set[str]) -> list[PlaceLoad]:
        """Return the load of every worker that takes tickets and has reported lately."""
        oldest = time.perf_counter() - REPORT_LIFETIME_S
        found = []
        for instance_id, (came_at, report) in list(self._others.items()):
            if came_at < oldest or instance_id not in helpers:
                continue
            if (place := PlaceLoad.of(report)) is not None:
                # The prompts of a prefill worker are tickets, which are counted by themselves.
                is_own = report.role != "prefill"
                found.append(place if is_own else replace(place, num_waiting_tokens=0))
        return found

    def _on_load(self, subject: str, payload: bytes) -> None:
        instance_id = subject.rpartition(".")[2]
        if instance_id in self._prefill_instances.items:
            try:
                report = _LOAD_REPORT.decode(payload)
            except DECODE_ERRORS as error:
                logger.warning("dropped a load report: %s", one_line(str(error), MAX_ERROR_BYTES))
                return
            self._others[instance_id] = time.perf_counter(), report
        elif instance_id in self._others:
            del self._others[instance_id]

    def _finished(self, active: ActiveRequest) -> None:
        """Remove an ended stream from the engine and account for it."""
        request_id = active.request.request_id
        is_whole = not active.done.cancelled() and active.done.exception() is None
        self.remote.cancel(request_id)
        if not is_whole:
            self.loop.post(lambda engine: engine.abort(request_id))
        self.metrics.finished(active)
        active.record_in(self._worker.trace)
        if active.decision is not None and logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "request %s: prefill %s (%s), %d prompt tokens, %d cached, %d sent, %s",
                request_id,
                active.decision.place,
                active.decision.reason,
                active.seq.num_prompt_tokens,
                active.num_cached_tokens,
                active.num_sent_tokens,
                "done" if is_whole else "broken off",
            )

    def on_outputs(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            active = self.active.get(output.request_id)
            if active is None:
                continue
            if not active.reported and active.decision is not None and output.error is None:
                self._worker.own_prompts.discard(output.request_id)
            active.emit(output)

    # ---- requests of other processes ----------------------------------------------------------

    def details(self, load: LoadStats) -> Details:
        """Return lines of `tandem status`."""
        thresholds = self.thresholds.current.model_dump(exclude_none=True)
        return {f"disagg.{key}": value for key, value in thresholds.items()} | {
            "num_open_handoffs": self.remote.num_open,
            "num_queued_jobs": self._queue_depth.num_jobs,
            "num_queued_tokens": self._queue_depth.num_tokens,
            "excluded": " ".join(self.remote.excluded()),
            "num_quarantined_blocks": load.num_quarantined_blocks,
            "num_preemptions": load.num_preemptions,
            **{f"prompts.{at}.{cause}": n for (at, cause), n in self.metrics.prompts.items()},
        }

    async def _send_model_files(
        self, payload: bytes, context: RequestContext, answer: Responder
    ) -> None:
        answer.send(encode(self._model_files))

    async def _send_kv_snapshot(
        self, payload: bytes, context: RequestContext, answer: Responder
    ) -> None:
        answer.send(encode(self._cache.snapshot()))

    def _check_handoffs(self, stats: LoadStats, *, is_idle: bool) -> None:
        try:
            self.remote.check_invariants()
            assert not is_idle or stats.num_quarantined_blocks == 0, "quarantine without a handoff"
        except AssertionError:
            logger.exception("an invariant of the handoffs is broken")

    async def _look_around(self) -> None:
        """Keep the view of the queue fresh, check the handoffs, and record the load."""
        try:
            if self.queue.connected and self._prefill_instances.items:
                self._queue_depth = await self.queue.depth()
                self.metrics.queued(self._queue_depth)
            elif not self._prefill_instances.items:
                self._queue_depth = NO_JOBS
                self.metrics.queued(None)
        except ServiceError as error:
            logger.debug("queue depth not known: %s", error)
        was_idle = self.remote.num_open == 0
        load = await self._worker.load()
        self._check_handoffs(load, is_idle=was_idle and self.remote.num_open == 0)
        self.metrics.loaded(load)
        self.metrics.targets(self.thresholds.current)
        self.metrics.excluded(len(self.remote.excluded()))
        self._cache.beat()
        await asyncio.sleep(LOOK_INTERVAL_S)


def _place_here(load: LoadStats) -> PlaceLoad | None:
    if load.costs is None:
        return None
    return PlaceLoad(load.costs, load.num_decodes, load.decode_context, load.num_waiting_tokens)
