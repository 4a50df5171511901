"""The worker around an engine.

startup   connect, start the engine, register it
drain     leave discovery, serve late callers for a grace, refuse new requests, finish running
          ones, drain the engine, wait for the transfers of a prefill engine
stop      clean up the engine, leave the cluster, revoke the lease
"""

import asyncio
import contextlib
import functools
import logging
import operator
import time

from tandem.runtime.address import EndpointAddress, host_port
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import TandemError
from tandem.runtime.process.lifecycle import Lifecycle, State
from tandem.runtime.tasks import cancel, keep_running
from tandem.sdk.engine.disaggregation import DisaggregationMode
from tandem.sdk.engine.errors import EngineShutdown
from tandem.sdk.engine.llm_engine import LLMEngine
from tandem.sdk.engine.metrics import EngineGauges, EngineMetrics, SnapshotPublisher
from tandem.sdk.engine.types import EngineConfig
from tandem.sdk.engine.worker_config import WorkerConfig
from tandem.sdk.engine_worker.ending import ShutdownBudget, Watchdog, within
from tandem.sdk.engine_worker.handler import EngineHandler
from tandem.sdk.engine_worker.load import EngineLoad
from tandem.sdk.engine_worker.prefill_stage import PrefillStage
from tandem.sdk.engine_worker.ranks import Ranks
from tandem.sdk.engine_worker.text import text_answers
from tandem.sdk.health.canary import Canary
from tandem.sdk.health.system_server import Actions, SystemServer, system_port
from tandem.sdk.kv.sources import kv_publishers
from tandem.sdk.worker.changes import Changes
from tandem.sdk.worker.cluster import find_cluster
from tandem.sdk.worker.distributed_runtime import DistributedRuntime, Endpoint
from tandem.sdk.worker.models import ModelInput, ModelRegistration, ModelType
from tandem.sdk.worker.serving import ServedEndpoint

logger = logging.getLogger(__name__)

_QUIESCENT_POLL_S = 0.05  # is_quiescent() can only be polled


class EngineWorker:
    """The worker of one engine. `run` goes through the stages `startup`, `drain` and `stop`.

    Without `runtime_config` the worker finds its cluster. Raise ConfigError naming an unsupported
    field of `config`.
    """

    def __init__(
        self, engine: LLMEngine, config: WorkerConfig, runtime_config: RuntimeConfig | None = None
    ) -> None:
        config.check()
        self._answers = config.answer_rules()
        self.engine = engine
        self.config = config
        cluster = find_cluster() if runtime_config is None else runtime_config
        self._port = system_port(cluster)
        # the system server uses that port, and serves the same metrics
        alone = cluster.model_copy(update={"metrics_port": None})
        self.runtime = DistributedRuntime(alone, component=config.served_component)
        self.budget = ShutdownBudget.of(cluster)
        self.address = EndpointAddress(config.namespace, config.served_component, config.endpoint)
        self.endpoint: Endpoint = self.runtime.endpoint(str(self.address))
        self.lifecycle = Lifecycle(drain_timeout_s=self.budget.total_s)
        self.system: SystemServer | None = None
        self._changes = Changes()  # of the load
        self.handler = EngineHandler(engine, self._changes.note)
        self._served: ServedEndpoint | None = None
        self._gauges: EngineGauges | None = None
        self._metrics = EngineMetrics({})
        self._is_engine_started = False
        self._canary: Canary | None = None
        self._sends_kv_events = False
        self._watchdog = Watchdog()
        self._stack = contextlib.AsyncExitStack()  # closed before the engine's cleanup

    async def run(self) -> None:
        """Serve until a signal or `shutdown`. Raise EngineShutdown when the engine fails."""
        await self.lifecycle.run(startup=self.startup, drain=self.drain, stop=self.stop)

    def shutdown(self) -> None:
        """Begin to drain; idempotent."""
        self.lifecycle.shut_down("asked for")

    @property
    def _is_prefill(self) -> bool:
        return self.config.disaggregation_mode is DisaggregationMode.PREFILL

    @property
    def _has_drain(self) -> bool:
        return type(self.engine).drain is not LLMEngine.drain

    # ---- startup ------------------------------------------------------------------------------

    async def startup(self) -> None:
        """Connect, start the engine, and register it."""
        await self.runtime.connect()
        if self._port is not None:
            self.system = self._system_server(self._port)
            await self.system.start()
            host = self.runtime.config.reachable_host
            self.runtime.metrics_address = host_port(host, self.system.port)
        engine_config = await self._start_engine()
        num_ranks = engine_config.data_parallel_size or 1
        if num_ranks > 1:
            self.handler.ranks = Ranks(engine_config.data_parallel_start_rank or 0, num_ranks)
        name = self._model_name(engine_config)
        self.runtime.model = name
        if self._is_prefill:
            if engine_config.bootstrap_port is not None:
                host = engine_config.bootstrap_host or self.runtime.config.reachable_host
                self.runtime.bootstrap = (host, engine_config.bootstrap_port)
            if engine_config.context_length is not None:
                self.runtime.max_prompt_tokens = engine_config.context_length - 1
        await self._measure(engine_config, name)
        await self._serve(engine_config, name)
        await self._watch_health()
        logger.info("%s serves %s at %s", self.runtime.instance_id, name, self.address)

    async def _start_engine(self) -> EngineConfig:
        # 63 bits fit into the integers of any engine
        worker_id = int(self.runtime.instance_id, 16) & (2**63 - 1)
        started_at = time.perf_counter()
        self._is_engine_started = True
        logger.info("starting the engine")
        try:
            engine_config = await self.engine.start(worker_id)
        except EngineShutdown:
            raise
        except Exception as error:
            message = error.message if isinstance(error, TandemError) else repr(error)
            raise EngineShutdown(f"the engine did not start: {message}") from error
        if not engine_config.model:
            raise EngineShutdown("the engine's start returned an EngineConfig with an empty model")
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
        """Set up the engine's metrics and load reports."""
        assert self._gauges is not None
        self._metrics.auto_labels = dict(self.config.metrics_labels) | self._labels(name)
        await self.engine.register_prometheus(self._metrics)
        if not self.config.enable_kv_routing:
            return
        publisher = None
        if ranks := self.engine.component_metrics_dp_ranks():
            publisher = SnapshotPublisher(self._gauges, ranks, self._changes.note)
            self.engine.attach_snapshot_publisher(publisher)
        load = EngineLoad(
            self.runtime.instance(self.address),
            "prefill" if self._is_prefill else "decode",
            self.handler,
            engine_config,
            publisher,
        )
        report = functools.partial(load.publish, self.runtime.events, self._changes)
        self._stack.push_async_callback(cancel, keep_running("the report of the load", report))

    async def _serve(self, engine_config: EngineConfig, name: str) -> None:
        config = self.config
        if config.disaggregation_mode is DisaggregationMode.DECODE:
            prefill = self.runtime.namespace(config.namespace).component("prefill")
            client = await prefill.endpoint(config.endpoint).client()
            stage = PrefillStage(client, self.runtime.instance_id)
            self._stack.push_async_callback(stage.close)
            await stage.start(self.runtime.events, config.namespace)
            self.handler.prefill = stage
        await self.engine.on_endpoint_ready(self.endpoint)
        if config.model_input is ModelInput.Text:
            answer = text_answers(self.handler.answer, engine_config.text_fields)
            self._served = self.endpoint.serve(answer)
        else:
            self._served = self.endpoint.serve(self.handler.serve)
        if config.enable_kv_routing:
            sources = await self.engine.kv_event_sources()
            block_size = engine_config.kv_cache_block_size
            publishers = kv_publishers(self.endpoint, sources, block_size)
            self._sends_kv_events = bool(await self._stack.enter_async_context(publishers))
        if not self._is_prefill:
            await self._register(engine_config, name)
        await self.endpoint.register()

    async def _register(self, engine_config: EngineConfig, name: str) -> None:
        """Publish a model card per name, for frontends."""
        given = engine_config.endpoint_types or self.config.endpoint_types
        types = [each.strip().capitalize() for each in given.split(",")]
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
                supports_grammar=engine_config.supports_grammar,
                supports_token_rules=engine_config.supports_token_rules,
                supports_images=engine_config.supports_images,
                total_kv_blocks=engine_config.total_kv_blocks,
                max_num_seqs=engine_config.max_num_seqs,
                max_num_batched_tokens=engine_config.max_num_batched_tokens,
                answers=self._answers,
            )
            await registration.publish()

    def _system_server(self, port: int) -> SystemServer:
        engine = self.engine
        return SystemServer(
            self.runtime.config.host,
            port,
            endpoints=lambda: {self.address.endpoint: self._is_well},
            metrics=self._metrics.render,
            actions={
                "control": Actions(engine.supported_controls, engine.engine_control),
                "update": Actions(engine.supported_updates, engine.engine_update),
            },
        )

    async def _watch_health(self) -> None:
        """Keep this instance out of discovery while the engine fails its health check."""
        payload = self.config.health_check_payload or await self.engine.health_check_payload()
        if payload is None:
            return
        self._canary = self.endpoint.canary(
            lambda: self.handler.probe(payload), lambda: self.handler.num_answered
        )
        await self._stack.enter_async_context(self._canary)

    @property
    def _is_well(self) -> bool:
        return self.lifecycle.state is State.SERVING and self.endpoint.is_registered

    # ---- the end ------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Finish running requests under one deadline; other workers resume the rest."""
        self._watchdog.start(self.budget.total_s)
        served, self._served = self._served, None
        if served is None:
            return
        started_at, budget = time.perf_counter(), self.budget

        def left_s(reserved_s: float) -> float:
            elapsed_s = time.perf_counter() - started_at
            return max(0.0, budget.total_s - reserved_s - elapsed_s)

        if self._canary is not None:
            await self._canary.close()  # it would register the endpoint again
        self.runtime.shutdown()  # ends the other endpoints of the engine
        await self.runtime.withdraw()
        logger.info("%s has left discovery", self.runtime.instance_id)
        await asyncio.sleep(budget.grace_s)
        for_transfers_s = budget.transfer_s if self._is_prefill or self._has_drain else 0.0
        await served.drain(left_s(budget.cleanup_s + for_transfers_s))
        await within("abort", self.handler.aborted(), left_s(budget.cleanup_s))
        drain_started_at = time.perf_counter()
        await within("drain", self.engine.drain(), left_s(budget.cleanup_s))
        if self._is_prefill:
            await self._quiesce(min(budget.transfer_s, left_s(budget.cleanup_s)))
        if self._gauges is not None:
            self._gauges.drained(time.perf_counter() - drain_started_at)

    async def _quiesce(self, timeout_s: float) -> None:
        """Wait until the KV cache is read no more, as far as the engine can tell."""
        deadline = time.perf_counter() + timeout_s
        while (answer := await self.engine.is_quiescent()) is not True:
            if answer is None and self._has_drain:
                return  # drain() has waited for the transfers
            if time.perf_counter() >= deadline:
                logger.warning("KV transfers may still be under way after %.1f s", timeout_s)
                return
            await asyncio.sleep(_QUIESCENT_POLL_S)

    async def stop(self) -> None:
        """Clean up the engine, if it was started, and leave the cluster."""
        self._watchdog.start(self.budget.total_s)
        try:
            # after a startup that failed at its end there may be callers
            await within("drain", self.drain(), self.budget.total_s or None)
            await within("publishing", self._stack.aclose(), self.budget.cleanup_s or None)
            if self._is_engine_started:
                self._is_engine_started = False
                started_at = time.perf_counter()
                await within("cleanup", self.engine.cleanup(), self.budget.cleanup_s or None)
                if self._gauges is not None:
                    self._gauges.cleaned_up(time.perf_counter() - started_at)
            if self.system is not None:
                await self.system.close()
            await self.runtime.close()
        finally:
            self._watchdog.stop()
        logger.info("%s has ended", self.runtime.instance_id)
