"""The prefill role: pulls tickets, computes prompts in batches, writes KV to decode workers."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.loop import EngineLoop, build_in_thread
from tandem.engine.model_runner import ModelRunner
from tandem.engine.outputs import SequenceOutput
from tandem.engine.schedule.sequence import LayerProgress, layer_boundaries
from tandem.prefill.config import PrefillConfig
from tandem.prefill.job import Job, JobTools, Step
from tandem.prefill.metrics import PrefillMetrics
from tandem.prefill.prefix_pull import ComputeRate, PrefixPuller
from tandem.queue.config import QueueConfig
from tandem.queue.deployment import deployment_id
from tandem.queue.jetstream import JetStreamQueue
from tandem.queue.prefill_queue import Delivery
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.discovery import watch_transfer
from tandem.runtime.errors import TandemError
from tandem.runtime.events import load_subject
from tandem.runtime.lifecycle import Lifecycle, freeze_gc
from tandem.runtime.messages import LoadReport, TransferMetadata, WorkerStatus, encode
from tandem.runtime.model_files import weights_fingerprint
from tandem.runtime.request_plane import Responder
from tandem.runtime.trace import TraceFile
from tandem.sdk.worker.distributed_runtime import DistributedRuntime
from tandem.transfer.config import TransferConfig
from tandem.transfer.link import GROUP_COUNTS
from tandem.transfer.pool import group_for, layout_of

logger = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.25
RETRY_S = 0.5  # after an error that nobody expected
MEET_AGAIN_S = 5.0  # after a decode worker could not be connected to, or measured


async def run_prefill(
    *,
    runtime: RuntimeConfig,
    engine: EngineConfig,
    transfer: TransferConfig,
    queue: QueueConfig,
    prefill: PrefillConfig,
    model_name: str,
) -> None:
    """Runs a prefill worker until a signal ends it. `engine.model` is the model's folder."""
    worker = PrefillWorker(runtime, engine, transfer, queue, prefill, model_name)
    freeze_gc()
    lifecycle = Lifecycle(drain_timeout_s=runtime.drain_timeout_s)
    worker.state = lambda: lifecycle.state.value
    await lifecycle.run(startup=worker.startup, drain=worker.drain, stop=worker.stop)


class PrefillWorker:
    """One prefill worker: its engine, its place in the cluster, and the jobs in its hands."""

    def __init__(
        self,
        runtime: RuntimeConfig,
        engine: EngineConfig,
        transfer: TransferConfig,
        queue: QueueConfig,
        prefill: PrefillConfig,
        model_name: str,
    ) -> None:
        self._runtime = runtime
        self._engine_config = engine
        self._transfer = transfer
        self._queue_config = queue
        self._config = prefill
        self._model_name = model_name
        self._folder = Path(engine.model)
        self.state: Callable[[], str] = lambda: "serving"
        self.engine = build_in_thread(lambda: Engine(engine, ModelRunner(engine)))
        self.loop = EngineLoop(self.engine, self._on_outputs, on_layers=self._on_layers)
        self.node = DistributedRuntime(
            runtime, component="prefill", model=model_name, progress=lambda: self.loop.progress
        )
        component = self.node.namespace(runtime.namespace).component("prefill")
        self.endpoint = component.endpoint("prefill")
        self.metrics = PrefillMetrics(model_name)
        self._steps: dict[str, asyncio.Queue[Step]] = {}
        self._jobs: dict[asyncio.Task[None], Job] = {}
        self._rate = ComputeRate()
        self._room = asyncio.Event()
        self._receiving: asyncio.Task[None] | None = None  # once it is up
        self._stack = contextlib.AsyncExitStack()

    # ---- lifecycle ----------------------------------------------------------------------------

    async def startup(self) -> None:
        """Joins the cluster and begins to pull tickets."""
        node, stack, namespace = self.node, self._stack, self._runtime.namespace
        trace = TraceFile(self._runtime.trace_file, "prefill", node.instance_id)
        self.trace = await stack.enter_async_context(trace)  # closed last: all that ends is in it
        stack.push_async_callback(node.close)
        await node.connect()
        await self.loop.start()
        stack.push_async_callback(self.loop.stop)
        (kv_cache,) = self.engine.runner.kv_caches
        self._group = group_for(self._transfer, kv_cache, node.instance_id, node.epoch)
        stack.push_async_callback(self._group.close)
        await self._group.start(lambda rank, data: None)
        self._deployment = deployment_id(
            namespace,
            self._model_name,
            weights_fingerprint(self._folder),
            layout_of(kv_cache.tensor).digest(),
        )
        self.queue = JetStreamQueue(node.nats, self._queue_config, namespace, self._model_name)
        await self.queue.start()
        stack.push_async_callback(self.queue.close)
        await self._watch_peers()
        node.server.register("status", self._status)
        stack.push_async_callback(self._end_jobs)
        self._receiving = asyncio.create_task(self._receive())
        reporting = asyncio.create_task(self._report_load())
        stack.callback(self._receiving.cancel)
        stack.callback(reporting.cancel)
        await self.endpoint.register()
        logger.info("prefill worker %s serves %s", node.instance_id, self._model_name)

    async def drain(self) -> None:
        """Takes no new ticket; jobs in hand go on up to the drain timeout."""
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.gather(self._receiving, return_exceptions=True)
            await self.queue.close()  # what was pulled and not begun goes to others
        await self.node.withdraw()
        if self._jobs:
            await asyncio.wait(self._jobs)

    async def stop(self) -> None:
        """Leaves the cluster; the pool is unregistered when no write can read it any more."""
        await self._stack.aclose()

    async def _watch_peers(self) -> None:
        """Connects to every decode worker before the first ticket of it comes."""
        self._peers = watch_transfer(self.node.discovery, self._runtime.namespace)
        await self._peers.ready()
        connecting: set[asyncio.Task[None]] = set()

        def changed(instance_id: str, peer: TransferMetadata | None) -> None:
            task = asyncio.create_task(self._meet(instance_id, peer))
            connecting.add(task)
            task.add_done_callback(connecting.discard)

        def stop_meeting() -> None:
            for task in connecting:
                task.cancel()

        self._stack.callback(stop_meeting)
        self._stack.callback(self._peers.subscribe(changed))

    async def _meet(self, instance_id: str, peer: TransferMetadata | None) -> None:
        """Again and again while the peer is there: it may be stopped, or busy, when it is met."""
        if peer is None:
            await self._group.disconnect(instance_id)
            self.metrics.link_gone(instance_id)
        while peer is not None and self._peers.items.get(instance_id) == peer:
            try:
                link = await self._group.connect(peer)
                num_layers = self._group.layout.num_layers
                for num_groups in GROUP_COUNTS:
                    await self._group.prepare(link, layer_boundaries(num_layers, num_groups))
                await self._group.measure(link)
                for report in self._group.reports():
                    self.metrics.link_measured(report)
                return
            except TandemError as error:
                logger.warning("decode worker %s: %s", instance_id, error)
                await asyncio.sleep(MEET_AGAIN_S)

    # ---- jobs ---------------------------------------------------------------------------------

    async def _receive(self) -> None:
        """Takes tickets while there is room, up to a budget of jobs and of uncached tokens."""
        config, block_size = self._config, self.engine.block_pool.block_size
        tools = JobTools(
            node=self.node,
            group=self._group,
            loop=self.loop,
            steps=self._steps,
            peers=self._peers,
            metrics=self.metrics,
            trace=self.trace,
            deployment=self._deployment,
            puller=PrefixPuller(self.loop, self._group, self._rate, block_size),
            block_size=block_size,
            max_chunk_tokens=self._engine_config.max_num_batched_tokens,
            transfer=self._transfer,
            renew_interval_s=self._queue_config.ack_wait_s / 3,
        )
        while True:
            is_full = len(self._jobs) >= config.max_batch_jobs
            if is_full or self._num_tokens >= config.max_batch_tokens:
                self._room.clear()
                await self._room.wait()
                continue
            # One at a time: the next may be too many tokens, and others may be idle.
            try:
                for delivery in await self.queue.receive(1, config.receive_timeout_s):
                    await self._begin(Job(tools, delivery), delivery)
            except Exception:
                logger.exception(
                    "a ticket could not be taken"
                )  # a worker that pulls no more is lost
                await asyncio.sleep(RETRY_S)

    async def _begin(self, job: Job, delivery: Delivery) -> None:
        if any(job.request_id == other.request_id for other in self._jobs.values()):
            # Two of one attempt would settle for each other while the other still writes.
            logger.info("handoff %s was delivered again while it runs", job.request_id)
            await delivery.ack()
            return
        task = asyncio.create_task(job.run())
        self._jobs[task] = job
        task.add_done_callback(self._job_done)

    @property
    def _num_tokens(self) -> int:
        """Uncached tokens of the jobs in hand."""
        return sum(job.ticket.num_uncached_tokens for job in self._jobs.values())

    def _job_done(self, task: "asyncio.Task[None]") -> None:
        del self._jobs[task]
        self._room.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a job failed", exc_info=error)

    async def _end_jobs(self) -> None:
        """Lets none post any more, and waits until each has settled."""
        for job in self._jobs.values():
            job.cancel("the prefill worker stopped")
        await asyncio.gather(*self._jobs, return_exceptions=True)

    def _on_outputs(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            if (steps := self._steps.get(output.request_id)) is not None:
                steps.put_nowait(output)

    def _on_layers(self, progress: list[LayerProgress]) -> None:
        for each in progress:
            if (steps := self._steps.get(each.request_id)) is not None:
                steps.put_nowait(each)

    # ---- what others ask ----------------------------------------------------------------------

    async def _status(self, payload: bytes, context: RequestContext, answer: Responder) -> None:
        load = await self._load()
        details: dict[str, str | int | float | bool] = {
            "num_jobs": len(self._jobs),
            "num_job_tokens": self._num_tokens,
            "num_peers": len(self._peers.items),
            "nats": self.node.nats.connected,
            "etcd": self.node.discovery.connected,
        }
        instance = self.node.instance(self.endpoint.address)
        links = self._group.reports()
        answer.send(encode(WorkerStatus(instance, self.state(), load, details, links)))

    async def _load(self) -> LoadReport:
        load = await self.loop.call(lambda engine: engine.load())
        return load.report(self.node.instance_id, self.node.epoch, "prefill")

    async def _report_load(self) -> None:
        subject = load_subject(self._runtime.namespace, self.node.instance_id)
        while True:
            load = await self._load()
            self.metrics.loaded(load)
            self.node.events.publish(subject, encode(load))
            await asyncio.sleep(LOAD_INTERVAL_S)
