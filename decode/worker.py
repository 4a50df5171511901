"""The decode role: generate tokens, and decide for each prompt where it is computed."""

import asyncio
import contextlib
import logging
import random
from functools import partial

from tandem.decode.admission import (
    decide,
    longest_local,
    with_targets,
    without_room,
)
from tandem.decode.config import DisaggConfig, Policy
from tandem.decode.explanations import Explanations
from tandem.decode.handoffs import RemotePrefills
from tandem.decode.kv_events import KvEventPublisher
from tandem.decode.metrics import DecodeMetrics
from tandem.decode.model_card import model_card
from tandem.decode.prefill_view import PrefillView
from tandem.decode.requests import ActiveRequest
from tandem.decode.thresholds import LiveThresholds
from tandem.engine.core.engine import Engine
from tandem.engine.schedule.outputs import LoadStats, SequenceOutput
from tandem.runtime.address import EndpointAddress
from tandem.runtime.bus.events import load_subject
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import (
    CancelledRequestError,
    IncompleteError,
    InternalError,
    InvalidRequestError,
    TandemError,
    UnavailableError,
)
from tandem.runtime.membership.model_files import MODEL_FILES_ENDPOINT
from tandem.runtime.plane.server import Responder
from tandem.runtime.store.discovery import (
    config_prefix,
    register_model,
    register_transfer,
    watch_instances,
)
from tandem.runtime.tasks import ends_within, keep_running
from tandem.runtime.wire.cluster_messages import RoleName
from tandem.runtime.wire.explain_messages import EXPLAIN_ENDPOINT
from tandem.runtime.wire.messages import ModelFiles, encode
from tandem.transfer.handoff.server import HandoffServer
from tandem.worker.role import Details
from tandem.worker.worker import Worker

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.25  # between looks at the queue while prompts may go there or jobs wait
IDLE_LOOK_INTERVAL_S = 2.0  # between these at other times


class DecodeRole:
    """Generates tokens for frontends, and decides for each prompt where it is computed."""

    name: RoleName = "decode"
    tickets: RemotePrefills

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
        self.active: dict[str, ActiveRequest] = {}
        self._explanations = Explanations(self.node.instance_id, self.active)
        self._unplaced: dict[str, int] = {}  # tokens of those whose prompt has no place yet
        self._needs_look = asyncio.Event()  # the depth of the queue may decide from now on
        self._handoffs = (0, 0)  # open ones and all so far, at the last load
        self._is_draining = False
        self._rng = random.Random()
        self._card_key = ""
        self._aio = asyncio.get_running_loop()

    # ---- lifecycle ----------------------------------------------------------------------------

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Serve the endpoints of requests, of handoffs and of what frontends fetch."""
        node = self.node
        await self._watch_cluster(stack)
        self._publish_cache()
        await self._start_remote(stack)
        stack.callback(self._hand_over, "the decode worker stopped")
        node.server.register(str(self.endpoint), self._generate)
        node.server.register(MODEL_FILES_ENDPOINT, self._send_model_files)
        node.server.register("kv_snapshot", self._send_kv_snapshot)
        node.server.register(EXPLAIN_ENDPOINT, self._explanations.send)
        stack.callback(keep_running("the look at the queue", self._look_around).cancel)

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

    def _publish_cache(self) -> None:
        node = self.node
        self._cache = KvEventPublisher(node.events, self._namespace, node.instance_id, node.epoch)
        self.engine.block_pool.on_stored = self._cache.stored
        self.engine.block_pool.on_removed = self._cache.removed

    async def _start_remote(self, stack: contextlib.AsyncExitStack) -> None:
        worker = self._worker
        instances, transfer = self._prefill_instances.items, worker.settings.transfer
        self.handoffs = HandoffServer(
            self.node, worker.group, transfer, instances, self.queue.publish
        )
        view = PrefillView(worker, self.handoffs.health, instances, self.metrics)
        self.prefill_view = view
        self.tickets = RemotePrefills(worker, self.handoffs, view, self.thresholds, self.metrics)
        stack.push_async_callback(
            await self.node.events.subscribe(load_subject(self._namespace), view.on_load)
        )
        stack.push_async_callback(self.handoffs.close)
        self.tickets.register(self.node.server)
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
        request = active.request
        active.seq.matcher = await self._worker.matcher_of(
            request.grammar, active.seq, request.caller
        )
        if self._is_draining:
            raise UnavailableError(f"{self.node.instance_id} is draining")
        request_id = request.request_id
        while (older := self.active.get(request_id)) is not None:
            if older.responder.shares_connection(responder):
                raise InvalidRequestError(f"request {request_id} is running already")
            # Its caller lost the older stream's connection before this worker noticed.
            older.fail(CancelledRequestError("the request came again on another connection"))
            await asyncio.sleep(0)
        self.active[request_id] = active
        self._unplaced[request_id] = active.seq.num_tokens
        if not self._needs_look.is_set() and self._may_use_queue():
            self._needs_look.set()
        self._worker.own_prompts.add(request_id, active.seq.num_tokens)
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
        """Decide, or queue the sequence until it has room. On the engine thread."""
        seq = active.seq
        self._unplaced.pop(seq.request_id, None)
        if active.done.done():
            return
        try:
            if not (engine.scheduler.has_room and self._decide(engine, active)):
                seq.on_room = partial(self._decide, engine, active)
                engine.add(seq)
        except TandemError as error:
            self._aio.call_soon_threadsafe(active.fail, error)

    def _decide(self, engine: Engine, active: ActiveRequest) -> bool:
        """Decide, then queue the sequence or reserve its blocks. On the engine thread.

        False where it should go away and has no blocks yet.
        """
        seq, config = active.seq, self.thresholds.current
        is_queued = seq.on_room is not None
        engine.aim(config.itl_target_ms, config.ttft_target_ms, longest_local(config))
        num_cached = engine.prefix_hit(seq)
        num_uncached = seq.num_tokens - num_cached
        num_following = sum(list(self._unplaced.values()))
        side = self.prefill_view.side(engine, seq, num_following)
        decision = decide(
            with_targets(config, active.request.targets),
            num_uncached,
            side,
            num_cached_tokens=num_cached,
            placement=active.request.prefill_place,
            prompt_logprobs=seq.prompt_scores is not None,
            drawn=self._rng.random(),
            waited_ms=active.timeline.elapsed_s() * 1e3 if is_queued else 0.0,
        )
        if decision.place == "remote":
            reservation = engine.reserve(seq)
            if reservation is not None:
                active.place(decision)
                self.prefill_view.reserved(num_uncached)
                self._aio.call_soon_threadsafe(self.tickets.start, active, reservation)
                return True
            if engine.scheduler.returns_blocks:
                return False
            decision = without_room(decision)
        active.place(decision, decision.places[0].shared_s if decision.places else 0.0)
        if not is_queued:
            engine.add(seq)
        return True

    def _finished(self, active: ActiveRequest) -> None:
        """Remove an ended stream from the engine and account for it."""
        request_id = active.request.request_id
        outcome = active.outcome
        self.tickets.cancel(active)
        if outcome != "finished":
            self.loop.post(lambda engine: engine.abort(request_id))
        self.metrics.finished(active, outcome)
        self._explanations.ended(active, outcome)
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
                outcome,
            )

    def on_outputs(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            active = self.active.get(output.request_id)
            if active is None or output.seq is not active.seq:
                continue  # of a stream that has ended; its request may have come again
            if not active.reported and active.decision is not None and output.error is None:
                self._worker.own_prompts.discard(output.request_id)
            active.emit(output)

    # ---- requests of other processes ----------------------------------------------------------

    def details(self, load: LoadStats) -> Details:
        """Return lines of `tandem status`."""
        thresholds = self.thresholds.current.model_dump(exclude_none=True)
        return {f"disagg.{key}": value for key, value in thresholds.items()} | {
            "num_prefill_instances": len(self._prefill_instances.items),
            "num_open_handoffs": self.handoffs.num_open,
            "num_queued_jobs": self.prefill_view.queue_depth.num_jobs,
            "num_queued_tokens": self.prefill_view.queue_depth.num_tokens,
            "excluded": " ".join(self.handoffs.excluded()),
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
            self.handoffs.check_invariants()
            assert not is_idle or stats.num_quarantined_blocks == 0, "quarantine without a handoff"
        except AssertionError:
            logger.exception("an invariant of the handoffs is broken")

    def loaded(self, load: LoadStats) -> None:
        """Record the load, and check the handoffs."""
        before, self._handoffs = (
            self._handoffs,
            (self.handoffs.num_open, self.prefill_view.num_reserved),
        )
        # None was open when the load was measured, if none is, none was, and none began meanwhile.
        self._check_handoffs(load, is_idle=self._handoffs == before and self.handoffs.num_open == 0)
        self.metrics.loaded(load)
        self.metrics.targets(self.thresholds.current)
        self.metrics.excluded(len(self.handoffs.excluded()))

    async def _look_around(self) -> None:
        """Keep the view of the queue fresh, and let frontends see that they have all events."""
        self._needs_look.clear()
        await self.prefill_view.look_at_queue()
        self._cache.beat()
        await asyncio.sleep(LOOK_INTERVAL_S)
        if not self._may_use_queue():
            await ends_within(self._needs_look.wait(), IDLE_LOOK_INTERVAL_S - LOOK_INTERVAL_S)

    def _may_use_queue(self) -> bool:
        """Return True while the depth of the queue decides where a prompt is computed."""
        if self.handoffs.num_open or self.prefill_view.queue_depth.num_jobs:
            return True
        return bool(self.active) and self.thresholds.current.policy is not Policy.ALWAYS_LOCAL
