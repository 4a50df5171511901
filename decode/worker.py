"""The decode role: generates tokens, and decides for each prompt who computes it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from tandem.decode.admission import Decision, PrefillSide, decide
from tandem.decode.config import DisaggConfig
from tandem.decode.handoff_messages import HandoffMessages
from tandem.decode.metrics import DecodeMetrics
from tandem.decode.publisher import CachePublisher, model_card
from tandem.decode.remote import RemotePrefills
from tandem.decode.requests import ActiveRequest
from tandem.decode.thresholds import LiveThresholds
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.loop import EngineLoop, build_in_thread
from tandem.engine.model_runner import ModelRunner
from tandem.engine.outputs import LoadStats, SequenceOutput
from tandem.engine.schedule.sequence import Sequence
from tandem.queue.config import QueueConfig
from tandem.queue.deployment import deployment_id
from tandem.queue.jetstream import JetStreamQueue
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.discovery import (
    config_prefix,
    model_key,
    register_transfer,
    watch_instances,
)
from tandem.runtime.errors import (
    IncompleteError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    ServiceError,
    TandemError,
    UnavailableError,
)
from tandem.runtime.events import load_subject
from tandem.runtime.lifecycle import Lifecycle, freeze_gc
from tandem.runtime.messages import GenerateRequest, LoadReport, WorkerStatus, encode, unpack_tokens
from tandem.runtime.model_files import read_model_files, weights_fingerprint
from tandem.runtime.request_plane import Responder
from tandem.runtime.trace import TraceFile
from tandem.sdk.worker.distributed_runtime import DistributedRuntime
from tandem.transfer.config import TransferConfig
from tandem.transfer.pool import group_for, layout_of

logger = logging.getLogger(__name__)

LOOK_AROUND_INTERVAL_S = 0.25  # load reports of an idle worker, and looks at the queue's depth
_REQUEST = msgspec.msgpack.Decoder(GenerateRequest)


async def run_decode(
    *,
    runtime: RuntimeConfig,
    engine: EngineConfig,
    transfer: TransferConfig,
    queue: QueueConfig,
    disagg: DisaggConfig,
    model_name: str,
) -> None:
    """Runs a decode worker until a signal ends it. `engine.model` is the model's folder."""
    worker = DecodeWorker(runtime, engine, transfer, queue, disagg, model_name)
    freeze_gc()
    lifecycle = Lifecycle(drain_timeout_s=runtime.drain_timeout_s)
    worker.state = lambda: lifecycle.state.value
    await lifecycle.run(startup=worker.startup, drain=worker.drain, stop=worker.stop)


class DecodeWorker:
    """One decode worker: its engine, its place in the cluster, and its open requests."""

    def __init__(
        self,
        runtime: RuntimeConfig,
        engine: EngineConfig,
        transfer: TransferConfig,
        queue: QueueConfig,
        disagg: DisaggConfig,
        model_name: str,
    ) -> None:
        self._runtime = runtime
        self._transfer = transfer
        self._queue_config = queue
        self._disagg = disagg
        self._model_name = model_name
        self._folder = Path(engine.model)
        self._model_files = read_model_files(self._folder)
        self.state: Callable[[], str] = lambda: "serving"
        self.engine = build_in_thread(lambda: Engine(engine, ModelRunner(engine)))
        self.loop = EngineLoop(self.engine, self._on_outputs)
        self.node = DistributedRuntime(
            runtime, component="decode", model=model_name, progress=lambda: self.loop.progress
        )
        component = self.node.namespace(runtime.namespace).component("decode")
        self.endpoint = component.endpoint("generate")
        self.metrics = DecodeMetrics(model_name)
        self.side = PrefillSide()
        self.active: dict[str, ActiveRequest] = {}
        self._num_queued_jobs = 0
        self._num_reserved = 0  # handoffs ever begun; counted on the engine thread
        self._is_draining = False
        self._aio = asyncio.get_running_loop()
        self._stack = contextlib.AsyncExitStack()

    # ---- lifecycle ----------------------------------------------------------------------------

    async def startup(self) -> None:
        """Joins the cluster; returns when requests can be served."""
        node, stack = self.node, self._stack
        trace = TraceFile(self._runtime.trace_file, "decode", node.instance_id)
        self.trace = await stack.enter_async_context(trace)  # closed last: all that ends is in it
        stack.push_async_callback(node.close)
        await node.connect()
        await self._watch_cluster()
        await self._start_engine()
        await self._start_remote()
        self.endpoint.serve_raw(self._generate)
        for endpoint, handler in (
            ("status", self._status),
            ("model_files", self._send_model_files),
            ("kv_snapshot", self._send_kv_snapshot),
        ):
            node.server.register(endpoint, handler)
        stack.callback(asyncio.create_task(self._look_around()).cancel)
        card = model_card(node, self.engine, self._model_files, self._folder)
        key = model_key(self._runtime.namespace, self._model_name, node.instance_id)
        await node.put(key, msgspec.json.encode(card))
        await self.endpoint.register()
        logger.info("decode worker %s serves %s", node.instance_id, self._model_name)

    async def drain(self) -> None:
        """Takes no new request; running ones go on up to the drain timeout.

        The request server stays open: remote prefills of running requests need its endpoints.
        """
        self._is_draining = True
        await self.node.withdraw()
        while self.active:
            await asyncio.wait([active.done for active in self.active.values()])

    async def stop(self) -> None:
        """Ends what is left, in the order that keeps memory valid while it is written to."""
        for active in list(self.active.values()):
            active.fail(IncompleteError("the decode worker stopped"))
        await self._stack.aclose()

    async def _watch_cluster(self) -> None:
        discovery, namespace = self.node.discovery, self._runtime.namespace
        view = discovery.watch(config_prefix(namespace))
        self._prefill_instances = watch_instances(discovery, namespace, "prefill")
        await view.ready()
        await self._prefill_instances.ready()
        self.thresholds = LiveThresholds(self._disagg, view, config_prefix(namespace))

    async def _start_engine(self) -> None:
        node, namespace = self.node, self._runtime.namespace
        self._cache = CachePublisher(node.events, namespace, node.instance_id, node.epoch)
        self.engine.block_pool.on_stored = self._cache.stored
        self.engine.block_pool.on_removed = self._cache.removed
        await self.loop.start()
        self._stack.push_async_callback(self.loop.stop)

    async def _start_remote(self) -> None:
        node, namespace, stack = self.node, self._runtime.namespace, self._stack
        (kv_cache,) = self.engine.runner.kv_caches
        group = group_for(self._transfer, kv_cache, node.instance_id, node.epoch)
        self.queue = JetStreamQueue(node.nats, self._queue_config, namespace, self._model_name)
        await self.queue.start()
        stack.push_async_callback(self.queue.close)
        self.remote = RemotePrefills(
            node=node,
            queue=self.queue,
            group=group,
            loop=self.loop,
            thresholds=lambda: self.thresholds.current,
            transfer=self._transfer,
            deployment=deployment_id(
                namespace,
                self._model_name,
                weights_fingerprint(self._folder),
                layout_of(kv_cache.tensor).digest(),
            ),
            prefill_instances=self._prefill_instances.items,
            metrics=self.metrics,
            rate=self.side.remote,
        )
        stack.push_async_callback(group.close)
        stack.push_async_callback(self.remote.close)
        messages = HandoffMessages(self.remote)
        messages.register(node.server)
        await group.start(messages.on_notification)
        # Not by `node`, which takes its keys back at once: a draining worker is still written to.
        await register_transfer(node.discovery, namespace, group.metadata())

    # ---- requests -----------------------------------------------------------------------------

    async def _generate(
        self, payload: bytes, context: RequestContext, responder: Responder
    ) -> None:
        if self._is_draining:
            raise UnavailableError(f"{self.node.instance_id} is draining")
        request = _REQUEST.decode(payload)
        if request.request_id in self.active:
            raise InvalidRequestError(f"request {request.request_id} is running already")
        if request.model != self._model_name:
            raise NotFoundError(f"this worker serves {self._model_name}, not {request.model}")
        token_ids = unpack_tokens(request.token_ids)
        vocab_size = self.engine.runner.model_config.vocab_size
        if token_ids and max(token_ids) >= vocab_size:
            raise InvalidRequestError(
                f"token id {max(token_ids)} is not below the vocabulary's {vocab_size}",
                param="prompt",
            )
        seq = Sequence(
            request_id=request.request_id,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids) - request.num_generated,
            sampling=request.sampling,
            stop=request.stop,
            cache_salt=request.cache_salt,
        )
        active = ActiveRequest(request, seq, context, responder, self._aio.create_future())
        self.active[request.request_id] = active
        forget = context.on_cancel(
            lambda: active.fail(context.error() or InternalError("cancelled without a reason"))
        )
        try:
            self.loop.post(lambda engine: self._place(engine, active))
            await active.done
        finally:
            forget()
            del self.active[request.request_id]
            self._finished(active)

    def _place(self, engine: Engine, active: ActiveRequest) -> None:
        """On the engine thread: decides, then queues the sequence or reserves its blocks."""
        seq = active.seq
        if active.done.done():
            return
        try:
            decision = decide(
                self.thresholds.current,
                seq.num_tokens - engine.prefix_hit(seq),
                self._look_at_prefill_side(engine),
                wish=active.request.prefill_place,
            )
            if decision.place == "remote":
                reservation = engine.reserve(seq)
                if reservation is not None:
                    active.decision = decision
                    self._num_reserved += 1
                    self._aio.call_soon_threadsafe(self.remote.start, active, reservation)
                    return
                decision = Decision("local", "no_blocks", "too few free blocks to reserve now")
            active.decision = decision
            engine.add(seq)
        except TandemError as error:
            self._aio.call_soon_threadsafe(active.fail, error)

    def _look_at_prefill_side(self, engine: Engine) -> PrefillSide:
        side = self.side
        excluded = self.remote.excluded()
        side.num_instances = sum(who not in excluded for who in self._prefill_instances.items)
        side.queue_connected = self.queue.connected
        # Counted here and not at the queue: a burst is placed before its first ticket is published.
        num_unclaimed = self._num_reserved - self.remote.num_taken
        side.num_queued_jobs = max(self._num_queued_jobs, num_unclaimed)
        side.num_running = len(engine.scheduler.running)
        return side

    def _finished(self, active: ActiveRequest) -> None:
        """Whatever ended the stream, nothing of it stays in the engine."""
        request_id = active.request.request_id
        is_whole = not active.done.cancelled() and active.done.exception() is None
        self.remote.cancel(request_id)
        if not is_whole:
            self.loop.post(lambda engine: engine.abort(request_id))
        self.metrics.finished(active)
        active.record_in(self.trace)
        if active.decision is not None:
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

    def _on_outputs(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            active = self.active.get(output.request_id)
            if active is None:
                continue
            if not active.reported and active.decision is not None and output.error is None:
                self._note_first(active, output)
            active.emit(output)

    def _note_first(self, active: ActiveRequest, output: SequenceOutput) -> None:
        assert active.decision is not None
        if active.decision.cause != "fallback":
            num_uncached = active.seq.num_given_tokens - output.num_cached_tokens
            if num_uncached > self.thresholds.current.max_local_prefill_length:
                self.side.local.observe(num_uncached, active.timeline.elapsed_s())

    # ---- what others ask ----------------------------------------------------------------------

    async def _status(self, payload: bytes, context: RequestContext, answer: Responder) -> None:
        load = await self.loop.call(lambda engine: engine.load())
        thresholds = self.thresholds.current
        details = {f"disagg.{key}": value for key, value in thresholds.model_dump().items()}
        details |= {
            "num_open_handoffs": self.remote.num_open,
            "num_queued_jobs": self._num_queued_jobs,
            "excluded": " ".join(self.remote.excluded()),
            "num_quarantined_blocks": load.num_quarantined_blocks,
            "num_preemptions": load.num_preemptions,
            "nats": self.node.nats.connected,
            "etcd": self.node.discovery.connected,
        }
        instance, report = self.node.instance(self.endpoint.address), self._report(load)
        answer.send(encode(WorkerStatus(instance, self.state(), report, details)))

    async def _send_model_files(
        self, payload: bytes, context: RequestContext, answer: Responder
    ) -> None:
        answer.send(encode(self._model_files))

    async def _send_kv_snapshot(
        self, payload: bytes, context: RequestContext, answer: Responder
    ) -> None:
        answer.send(encode(self._cache.snapshot()))

    def _report(self, load: LoadStats) -> LoadReport:
        return load.report(self.node.instance_id, self.node.epoch, "decode")

    def _check_handoffs(self, stats: LoadStats, *, is_idle: bool) -> None:
        try:
            self.remote.check_invariants()
            assert not is_idle or stats.num_quarantined_blocks == 0, "quarantine without a handoff"
        except AssertionError:
            logger.exception("the bookkeeping of handoffs is wrong")

    async def _look_around(self) -> None:
        """Keeps the view of the queue fresh, and tells of the load also when it is quiet."""
        subject = load_subject(self._runtime.namespace, self.node.instance_id)
        while True:
            try:
                if self.queue.connected and self._prefill_instances.items:
                    self._num_queued_jobs = (await self.queue.depth()).num_jobs
            except ServiceError as error:
                logger.debug("queue depth not known: %s", error)
            was_idle = self.remote.num_open == 0
            stats = await self.loop.call(lambda engine: engine.load())
            self._check_handoffs(stats, is_idle=was_idle and self.remote.num_open == 0)
            load = self._report(stats)
            self.metrics.loaded(stats)
            self.metrics.excluded(len(self.remote.excluded()))
            self.node.events.publish(subject, encode(load))
            self._cache.beat()
            await asyncio.sleep(LOOK_AROUND_INTERVAL_S)
