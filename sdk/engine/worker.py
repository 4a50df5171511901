"""The worker around an engine: it joins the cluster, serves, and ends in order.

startup   connect, start the engine, be known
drain     leave discovery, a grace in which late callers are still served, no new requests,
          running ones to their end, the engine's drain, transfers of a prefill engine
stop      the engine's cleanup, then the cluster is left and the lease given back
"""

import asyncio
import contextlib
import functools
import logging
import operator
import os
import threading
import time
from collections.abc import Awaitable

from tandem.runtime.address import EndpointAddress
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import TandemError
from tandem.runtime.lifecycle import EXIT_IMPATIENT, Lifecycle, State
from tandem.sdk.engine.disaggregation import DisaggregationMode
from tandem.sdk.engine.handler import EngineHandler
from tandem.sdk.engine.llm_engine import LLMEngine
from tandem.sdk.engine.load import LoadReporter, Sender
from tandem.sdk.engine.metrics import EngineGauges, EngineMetrics, SnapshotPublisher
from tandem.sdk.engine.prefill_stage import PrefillStage
from tandem.sdk.engine.shutdown_budget import ShutdownBudget
from tandem.sdk.engine.text import TextAnswers
from tandem.sdk.engine.types import EngineConfig
from tandem.sdk.engine.worker_config import WorkerConfig
from tandem.sdk.exceptions import EngineShutdown
from tandem.sdk.kv.sources import open_kv_sources
from tandem.sdk.worker.canary import CANARY_INTERVAL_S, Canary
from tandem.sdk.worker.cluster import find_cluster
from tandem.sdk.worker.distributed_runtime import DistributedRuntime, Endpoint
from tandem.sdk.worker.models import ModelInput, ModelRegistration, ModelType
from tandem.sdk.worker.serving import ServedEndpoint
from tandem.sdk.worker.system_server import Actions, SystemRoutes, SystemServer, system_port

logger = logging.getLogger(__name__)

_QUIESCENT_POLL_S = 0.05  # transfers only poll
_HANG_S = 5.0  # behind the deadline, for an engine that blocks the event loop


class EngineWorker:
    """Runs one engine. `run` is its whole life; `startup`, `drain` and `stop` are its stages.

    Without `runtime_config` it looks for its cluster. Raises ConfigError naming the field of
    `config` that cannot be served.
    """

    def __init__(
        self,
        engine: LLMEngine,
        config: WorkerConfig,
        runtime_config: RuntimeConfig | None = None,
        *,
        canary_interval_s: float = CANARY_INTERVAL_S,
    ) -> None:
        config.check()
        self.engine = engine
        self.config = config
        cluster = find_cluster() if runtime_config is None else runtime_config
        self._port = system_port(cluster)
        # the system server has that port, and serves the same metrics
        alone = cluster.model_copy(update={"metrics_port": None})
        self.runtime = DistributedRuntime(alone, component=config.served_component)
        self.budget = ShutdownBudget.of(cluster)
        self.address = EndpointAddress(config.namespace, config.served_component, config.endpoint)
        self.endpoint: Endpoint = self.runtime.endpoint(str(self.address))
        self.lifecycle = Lifecycle(drain_timeout_s=self.budget.total_s)
        self.system: SystemServer | None = None
        self._load = LoadReporter()
        self.handler = EngineHandler(engine, self._load.changed)
        self._served: ServedEndpoint | None = None
        self._gauges: EngineGauges | None = None
        self._metrics = EngineMetrics({})
        self._is_engine_started = False
        self._canary: Canary | None = None
        self._watching_health: asyncio.Task[None] | None = None
        self._canary_interval_s = canary_interval_s
        self._sends_kv_events = False
        self._watchdog: threading.Timer | None = None
        self._stack = contextlib.AsyncExitStack()  # what ends before the engine does

    async def run(self) -> None:
        """Serves until a signal, or `shutdown`. Raises EngineShutdown when the engine fails."""
        await self.lifecycle.run(startup=self.startup, drain=self.drain, stop=self.stop)

    def shutdown(self, reason: str = "asked for") -> None:
        """Begins the orderly end; idempotent."""
        self.lifecycle.shut_down(reason)

    @property
    def _is_prefill(self) -> bool:
        return self.config.disaggregation_mode is DisaggregationMode.PREFILL

    @property
    def _has_drain(self) -> bool:
        return type(self.engine).drain is not LLMEngine.drain

    # ---- startup ------------------------------------------------------------------------------

    async def startup(self) -> None:
        """Joins the cluster, starts the engine, and is known."""
        await self.runtime.connect()
        if self._port is not None:
            self.system = SystemServer(self.runtime.config.host, self._port, self._routes())
            await self.system.start()
        engine_config = await self._start_engine()
        name = self._model_name(engine_config)
        self.runtime.model = name
        await self._measure(engine_config, name)
        await self._serve(engine_config, name)
        await self._watch_health()
        logger.info("%s serves %s at %s", self.runtime.instance_id, name, self.address)

    async def _start_engine(self) -> EngineConfig:
        # 63 bits, which any engine's integers have room for
        worker_id = int(self.runtime.instance_id, 16) & (2**63 - 1)
        started_at = time.perf_counter()
        self._is_engine_started = True
        logger.info("the engine starts")
        try:
            engine_config = await self.engine.start(worker_id)
        except EngineShutdown:
            raise
        except Exception as error:
            message = error.message if isinstance(error, TandemError) else repr(error)
            raise EngineShutdown(f"the engine did not start: {message}") from error
        if not engine_config.model:
            raise EngineShutdown("the engine's start gave an EngineConfig with an empty model")
        duration_s = time.perf_counter() - started_at
        self._gauges = EngineGauges(self._labels(self._model_name(engine_config)))
        self._gauges.loaded(duration_s)
        logger.info("the engine started in %.1f s", duration_s)
        return engine_config

    def _model_name(self, engine_config: EngineConfig) -> str:
        served = self.config.served_model_name or engine_config.served_model_name
        return served or self.config.model_name or engine_config.model

    def _labels(self, model: str) -> dict[str, str]:
        return {
            "namespace": self.address.namespace,
            "component": self.address.component,
            "endpoint": self.address.endpoint,
            "worker_id": self.runtime.instance_id,
            "model": model,
        }

    async def _measure(self, engine_config: EngineConfig, name: str) -> None:
        """Metrics of the engine, and the reports of its load."""
        assert self._gauges is not None
        self._metrics.auto_labels = dict(self.config.metrics_labels) | self._labels(name)
        await self.engine.register_prometheus(self._metrics)
        if not self.config.enable_kv_routing:
            return
        ranks = self.engine.component_metrics_dp_ranks()
        if ranks:
            publisher = SnapshotPublisher(self._gauges, ranks, self._load.changed)
            self._load.snapshots = publisher
            self.engine.attach_snapshot_publisher(publisher)
        sender = Sender(
            self.runtime.instance(self.address),
            "prefill" if self._is_prefill else "decode",
            self.handler,
            engine_config,
        )
        self._stack.push_async_callback(self._load.close)
        self._load.start(self.runtime.events, sender)

    async def _serve(self, engine_config: EngineConfig, name: str) -> None:
        config = self.config
        if config.disaggregation_mode is DisaggregationMode.DECODE:
            prefill = self.runtime.namespace(config.namespace).component("prefill")
            stage = PrefillStage(await prefill.endpoint(config.endpoint).client())
            self._stack.push_async_callback(stage.close)
            self.handler.prefill = stage
        await self.engine.on_endpoint_ready(self.endpoint)
        if config.model_input is ModelInput.Text:
            self._served = self.endpoint.serve(TextAnswers(self.handler.answer).answer)
        else:
            self._served = self.endpoint.serve(self.handler.answer)
        if config.enable_kv_routing:
            await self._publish_kv_events(engine_config)
        if not self._is_prefill:
            await self._register(engine_config, name)
        await self.endpoint.register()

    async def _publish_kv_events(self, engine_config: EngineConfig) -> None:
        sources = await self.engine.kv_event_sources()
        opened = await open_kv_sources(self.endpoint, sources, engine_config.kv_cache_block_size)
        self._stack.push_async_callback(opened.close)
        self._sends_kv_events = bool(opened.publishers)

    async def _register(self, engine_config: EngineConfig, name: str) -> None:
        """The model's cards, which is what frontends follow: one per name."""
        types = [each.strip().capitalize() for each in self.config.endpoint_types.split(",")]
        for each in (name, *engine_config.model_aliases):
            registration = ModelRegistration(
                self.config.model_input,
                functools.reduce(operator.or_, (ModelType[kind] for kind in types)),
                self.endpoint,
                engine_config.model,
                each,
                engine_config.context_length,
                engine_config.kv_cache_block_size,
                user_data=engine_config.card_data(),
                custom_template_path=self.config.custom_jinja_template,
                sends_kv_events=self._sends_kv_events,
                total_kv_blocks=engine_config.total_kv_blocks,
                max_num_seqs=engine_config.max_num_seqs,
                max_num_batched_tokens=engine_config.max_num_batched_tokens,
            )
            await registration.publish()

    def _routes(self) -> SystemRoutes:
        engine = self.engine
        return SystemRoutes(
            endpoints=lambda: {self.address.endpoint: self._is_well},
            metrics=lambda: self._metrics.render(),
            controls=Actions(engine.supported_controls, engine.engine_control),
            updates=Actions(engine.supported_updates, engine.engine_update),
        )

    async def _watch_health(self) -> None:
        """While the engine fails its health check this instance is known to nobody."""
        payload = self.config.health_check_payload or await self.engine.health_check_payload()
        if payload is None:
            return

        async def changed(is_healthy: bool) -> None:
            await (self.endpoint.register() if is_healthy else self.endpoint.withdraw())

        self._canary = Canary(
            lambda: self.handler.probe(payload),
            lambda: self.handler.num_answered,
            changed,
            interval_s=self._canary_interval_s,
        )
        self._watching_health = asyncio.create_task(self._canary.watch())
        self._stack.push_async_callback(self._end_canary)

    async def _end_canary(self) -> None:
        if self._watching_health is not None:
            self._watching_health.cancel()
            await asyncio.gather(self._watching_health, return_exceptions=True)
            self._watching_health = None

    @property
    def _is_well(self) -> bool:
        is_serving = self.lifecycle.state is State.SERVING
        return is_serving and (self._canary is None or self._canary.is_healthy)

    # ---- the end ------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Ends what runs, under one deadline; what does not end in time is left to others."""
        self._watch_end()
        served, self._served = self._served, None
        if served is None:
            return
        started_at, budget = time.perf_counter(), self.budget

        def left_s(reserved_s: float) -> float:
            elapsed_s = time.perf_counter() - started_at
            return max(0.0, budget.total_s - reserved_s - elapsed_s)

        await self._end_canary()  # which would make it known again
        self.runtime.shutdown()  # what else the engine serves ends with it
        await self.runtime.withdraw()
        logger.info("%s has left discovery", self.runtime.instance_id)
        await asyncio.sleep(budget.grace_s)
        for_transfers_s = budget.transfer_s if self._is_prefill or self._has_drain else 0.0
        await served.drain(left_s(budget.cleanup_s + for_transfers_s))
        await _within("abort", self.handler.aborted(), left_s(budget.cleanup_s))
        drain_started_at = time.perf_counter()
        await _within("drain", self.engine.drain(), left_s(budget.cleanup_s))
        if self._is_prefill:
            await self._quiesce(min(budget.transfer_s, left_s(budget.cleanup_s)))
        if self._gauges is not None:
            self._gauges.drained(time.perf_counter() - drain_started_at)

    async def _quiesce(self, timeout_s: float) -> None:
        """Until nobody reads the KV cache any more, as far as the engine can tell."""
        deadline = time.perf_counter() + timeout_s
        while (answer := await self.engine.is_quiescent()) is not True:
            if answer is None and self._has_drain:
                return  # its drain has waited for them
            if time.perf_counter() >= deadline:
                logger.warning("KV transfers may be under way after %.1f s", timeout_s)
                return
            await asyncio.sleep(_QUIESCENT_POLL_S)

    async def stop(self) -> None:
        """Cleans up the engine, if it was started, and leaves the cluster."""
        self._watch_end()
        try:
            # a startup that failed in its last moments: there may be callers already
            await _within("drain", self.drain(), self.budget.total_s or None)
            await _within("publishing", self._stack.aclose(), self.budget.cleanup_s or None)
            if self._is_engine_started:
                self._is_engine_started = False
                started_at = time.perf_counter()
                await _within("cleanup", self.engine.cleanup(), self.budget.cleanup_s or None)
                if self._gauges is not None:
                    self._gauges.cleaned_up(time.perf_counter() - started_at)
            if self.system is not None:
                await self.system.close()
            await self.runtime.close()
        finally:
            if self._watchdog is not None:
                self._watchdog.cancel()
        logger.info("%s has ended", self.runtime.instance_id)

    def _watch_end(self) -> None:
        """From the first stage of the end on: an engine that hangs does not keep the process."""
        if self._watchdog is None:
            self._watchdog = threading.Timer(self.budget.total_s + _HANG_S, _give_up)
            self._watchdog.daemon = True
            self._watchdog.start()


def _give_up() -> None:
    logger.error("the engine hangs: exiting at once")
    os._exit(EXIT_IMPATIENT)


async def _within(what: str, ending: Awaitable[None], timeout_s: float | None) -> None:
    """An engine's way of ending never stands in the way of the process's."""
    try:
        async with asyncio.timeout(timeout_s):
            await ending
    except TimeoutError:
        logger.warning("the engine's %s took longer than %.1f s", what, timeout_s or 0.0)
    except Exception:
        logger.exception("the engine's %s failed", what)
