"""What operators see of an engine's worker: health, metrics, load, controls, its process."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Gauge

from tandem.runtime.bus.events import kv_subject, load_subject
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import OverloadedError
from tandem.runtime.store.discovery import watch_models
from tandem.runtime.wire.cluster_messages import KvEvent, LoadReport
from tandem.sdk import (
    ComponentSnapshot,
    Context,
    DistributedRuntime,
    Endpoint,
    EngineConfig,
    EngineWorker,
    GenerateRequest,
    run,
)
from tandem.sdk.engine.health_check import build_health_check_payload
from tandem.sdk.engine.metrics import EngineMetrics, register_engine_registry
from tandem.sdk.kv.events import KvEventPublisher
from tandem.sdk.kv.sources import PushSource
from tandem.sdk.sample_engine import expected_tokens
from tests.processes import cluster_variables
from tests.sdk.engine.engine_stack import (
    PATIENCE_S,
    Chunks,
    Publishing,
    ToyEngine,
    answer_of,
    client_of,
    config_of,
    serving,
)
from tests.services import eventually


@pytest.fixture
def quick(runtime_config: RuntimeConfig) -> RuntimeConfig:
    return runtime_config.model_copy(update={"drain_timeout_s": 0.8, "metrics_port": 0})


class Observed(Publishing):
    """Has everything that an operator can look at or turn."""

    async def register_prometheus(self, metrics: EngineMetrics) -> None:
        registry = CollectorRegistry()
        Gauge("toy:temperature", "help", registry=registry).set(21)
        register_engine_registry(metrics, registry, prefix_filters=["toy:"])

    def supported_controls(self) -> set[str]:
        return {"pause"}

    async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("now"):
            raise OverloadedError("requests are running")
        return {"status": "ok", "control": control, "body": body}

    def supported_updates(self) -> set[str]:
        return {"weights"}

    async def engine_update(self, update: str, body: dict[str, Any]) -> dict[str, Any]:
        raise OSError("no such file")


@contextlib.asynccontextmanager
async def browsing(worker: EngineWorker) -> AsyncIterator[httpx.AsyncClient]:
    assert worker.system is not None
    url = f"http://127.0.0.1:{worker.system.port}"
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        yield http


async def test_the_system_server_reports_health_and_runs_commands(quick: RuntimeConfig) -> None:
    async with serving(Observed(), config_of(), quick) as worker, browsing(worker) as http:
        assert (await http.get("/live")).status_code == 200
        health = await http.get("/health")
        assert health.status_code == 200
        assert health.json()["status"] == "ready"
        assert health.json()["endpoints"] == {"generate": "ready"}

        done = await http.post("/engine/control/pause", json={"a": 1})
        assert done.json() == {"status": "ok", "control": "pause", "body": {"a": 1}}
        assert (await http.post("/engine/control/pause")).json()["body"] == {}
        for path, content, status, words in (
            ("/engine/control/resume", b"", 404, "it has: pause"),
            ("/engine/control/pause", b"[1]", 400, "not a JSON object"),
            ("/engine/control/pause", b"{", 400, "not JSON"),
            ("/engine/control/pause", b'{"now": true}', 503, "requests are running"),
            ("/engine/update/weights", b"", 500, "no such file"),
        ):
            refused = await http.post(path, content=content)
            assert (refused.status_code, words in refused.json()["message"]) == (status, True)
        assert (await http.get("/engine/control/pause")).status_code == 405


async def test_metrics_have_the_engines_own_with_labels_and_its_cache(quick: RuntimeConfig) -> None:
    engine = Observed()
    async with serving(engine, config_of(metrics_labels=[("team", "a")]), quick) as worker:
        engine.publisher.publish(0, ComponentSnapshot(2, 8, 0.25, 0, kv_cache_hit_rate=0.5))
        with pytest.raises(ValueError, match="rank 1"):
            engine.publisher.publish(1, ComponentSnapshot(2, 8, 0.25, 1))
        async with browsing(worker) as http:
            text = (await http.get("/metrics")).text
        who = f'worker_id="{worker.runtime.instance_id}"'
        lines = {line.partition("{")[0]: line for line in text.splitlines() if who in line}
        assert lines["tandem_component_gpu_cache_usage_percent"].endswith(" 0.25")
        assert lines["tandem_component_total_blocks"].endswith(" 8.0")
        assert lines["tandem_component_kv_cache_hit_rate"].endswith(" 0.5")
        assert float(lines["tandem_component_model_load_time_seconds"].rpartition(" ")[2]) >= 0
        assert 'team="a"' in lines["toy:temperature"]
        assert 'model="toy"' in lines["toy:temperature"]
    labels = {
        "namespace": "pipe",
        "component": "backend",
        "endpoint": "generate",
        "worker_id": worker.runtime.instance_id,
        "model": "toy",
    }
    for name in ("drain", "cleanup"):
        assert (
            REGISTRY.get_sample_value(f"tandem_component_{name}_time_seconds", labels) is not None
        )


async def test_routers_get_the_load_of_requests_and_blocks(quick: RuntimeConfig) -> None:
    engine = Observed()
    engine.may_go_on.clear()
    reports: list[LoadReport] = []
    decode = msgspec.msgpack.Decoder(LoadReport).decode
    async with DistributedRuntime(quick.model_copy(update={"metrics_port": None})) as listener:
        await listener.events.subscribe(
            load_subject("pipe"), lambda _, data: reports.append(decode(data))
        )
        async with serving(engine, config_of(), quick) as worker, client_of(worker) as client:
            engine.publisher.publish(0, ComponentSnapshot(3, 8, 0.375, 0))
            asking = asyncio.create_task(answer_of(client, {"token_ids": [1]}))
            await eventually(lambda: bool(reports) and reports[-1].num_running == 1)
            assert reports[-1].instance_id == worker.runtime.instance_id
            assert (reports[-1].num_blocks, reports[-1].num_free_blocks) == (8, 5)
            engine.may_go_on.set()
            await asking
            await eventually(lambda: reports[-1].num_running == 0)


class Caching(ToyEngine):
    """Has a prefix cache, and says so."""

    publisher: KvEventPublisher

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(
            "tandem-tiny", served_model_name="toy", kv_cache_block_size=4, supports_grammar=True
        )

    async def kv_event_sources(self) -> list[PushSource]:
        return [PushSource(on_ready=lambda publisher: setattr(self, "publisher", publisher))]


@pytest.mark.parametrize("is_on", [True, False])
async def test_routers_get_the_prefix_cache_unless_it_is_turned_off(
    quick: RuntimeConfig, is_on: bool
) -> None:
    engine = Caching()
    events: list[KvEvent] = []
    decode = msgspec.msgpack.Decoder(KvEvent).decode
    async with DistributedRuntime(quick.model_copy(update={"metrics_port": None})) as listener:
        await listener.events.subscribe(
            kv_subject("pipe"), lambda _, data: events.append(decode(data))
        )
        async with serving(engine, config_of(enable_kv_routing=is_on), quick) as worker:
            cards = watch_models(listener.discovery, quick.namespace)
            await cards.wait_for(lambda items: bool(items), PATIENCE_S)
            (card,) = cards.items.values()
            assert (card.name, card.block_size, card.sends_kv_events) == ("toy", 4, is_on)
            assert card.supports_grammar
            await cards.close()
            assert hasattr(engine, "publisher") == is_on
            if is_on:
                engine.publisher.publish_stored(list(range(8)), block_hashes=[1, 2])
                await eventually(lambda: bool(events))
                assert events[0].instance_id == worker.runtime.instance_id
                assert len(events[0].stored) == 2


async def test_an_engine_that_fails_its_health_check_gets_no_requests_until_it_is_well(
    quick: RuntimeConfig,
) -> None:
    class Moody(ToyEngine):
        is_well = True

        async def generate(self, request: GenerateRequest, context: Context) -> Chunks:
            self.requests.append(request)
            if not self.is_well:
                raise RuntimeError("out of order")
            yield {"token_ids": [1], "index": 0, "finish_reason": "stop"}

        async def health_check_payload(self) -> dict[str, Any] | None:
            return build_health_check_payload(3)

    engine = Moody()
    worker = EngineWorker(engine, config_of(), quick)
    worker.runtime.canary_interval_s = 0.02
    running = asyncio.create_task(worker.run())
    async with client_of(worker) as client:
        await client.wait_for_instances(PATIENCE_S)
        await eventually(lambda: len(engine.requests) > 1)
        engine.is_well = False
        await eventually(lambda: not client.instance_ids())
        async with browsing(worker) as http:
            assert (await http.get("/health")).status_code == 503
            assert (await http.get("/live")).status_code == 200
        engine.is_well = True
        await eventually(lambda: bool(client.instance_ids()))
    worker.shutdown()
    await running


async def test_a_command_can_take_an_engine_out_of_discovery_and_back(
    quick: RuntimeConfig,
) -> None:
    class Sleeper(ToyEngine):
        async def on_endpoint_ready(self, endpoint: Endpoint) -> None:
            self.endpoint = endpoint

        def supported_controls(self) -> set[str]:
            return {"sleep", "wake_up"}

        async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
            if control == "sleep":
                await self.endpoint.unregister_endpoint_instance()
            else:
                await self.endpoint.register_endpoint_instance()
            return {"status": "ok"}

    async with serving(Sleeper(), config_of(), quick) as worker, client_of(worker) as client:
        async with browsing(worker) as http:
            for _ in range(2):
                assert (await http.post("/engine/control/sleep")).status_code == 200
                await eventually(lambda: not client.instance_ids())
                assert (await http.get("/health")).status_code == 503
                assert (await http.post("/engine/control/wake_up")).status_code == 200
                await eventually(lambda: bool(client.instance_ids()))
                assert (await http.get("/health")).status_code == 200
        assert await answer_of(client, {"token_ids": [1]})


# ---- processes --------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def process_of(
    config: RuntimeConfig, *command: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        env={**cluster_variables(config), "PYTHONPATH": ":".join(sys.path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def test_the_sample_engines_process_serves_and_ends_at_sigterm(
    runtime_config: RuntimeConfig,
) -> None:
    flags = ("--model-name", "test-model", "--token-interval-ms", "1", "--namespace", "pipe")
    async with process_of(runtime_config, "-m", "tandem.sdk.sample_engine", *flags) as process:
        async with DistributedRuntime(runtime_config) as runtime:
            client = await runtime.endpoint("pipe.backend.generate").client()
            await client.wait_for_instances(60.0)
            assert client.instances()[0].model == "test-model"
            chunks = await answer_of(client, {"token_ids": [40, 41]})
            generated = [token_id for chunk in chunks for token_id in chunk["token_ids"]]
            assert generated == expected_tokens([40, 41], 16)
            await client.close()
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.wait_for(process.communicate(), 60.0)
        assert process.returncode == 0, log.decode()
        assert b"RuntimeWarning" not in log


SLOW = """
import asyncio
from tandem.sdk import run
from tests.sdk.engine.engine_stack import ToyEngine

class Slow(ToyEngine):
    async def drain(self):
        await asyncio.sleep(60)

run(Slow)
"""


async def test_a_second_signal_ends_the_process_at_once(runtime_config: RuntimeConfig) -> None:
    patient = runtime_config.model_copy(update={"drain_timeout_s": 60.0})
    async with process_of(patient, "-c", SLOW) as process:
        async with DistributedRuntime(runtime_config) as runtime:
            client = await runtime.endpoint("pipe.backend.generate").client()
            await client.wait_for_instances(60.0)
            process.send_signal(signal.SIGTERM)
            await eventually(lambda: not client.instance_ids())
            process.send_signal(signal.SIGINT)
            await client.close()
        assert await asyncio.wait_for(process.wait(), 60.0) == 70


def status_of_run(
    engine: type[ToyEngine], config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch
) -> object:
    """Run an engine as its process does, and return the exit status."""
    for name, value in cluster_variables(config).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TANDEM_RUNTIME__CONNECT_ATTEMPTS", "1")
    with pytest.raises(SystemExit) as ended:
        run(engine)
    return ended.value.code


def test_an_engine_that_does_not_start_ends_its_process_with_status_1(
    runtime_config: RuntimeConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[str] = []

    class Broken(ToyEngine):
        async def start(self, worker_id: int) -> EngineConfig:
            raise OSError("no weights")

        async def cleanup(self) -> None:
            calls.append("cleanup")

    assert status_of_run(Broken, runtime_config, monkeypatch) == 1
    assert calls == ["cleanup"]
    assert "the engine did not start" in caplog.text
    assert "OSError: no weights" in caplog.text


def test_an_address_that_does_not_answer_ends_the_process_with_one_line(
    runtime_config: RuntimeConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[str] = []

    class Idle(ToyEngine):
        async def start(self, worker_id: int) -> EngineConfig:
            calls.append("start")
            return await super().start(worker_id)

    away = runtime_config.model_copy(update={"nats_url": "nats://127.0.0.1:9"})
    assert status_of_run(Idle, away, monkeypatch) == 1
    assert calls == []
    assert "NATS not reachable at nats://127.0.0.1:9" in caplog.text
    assert "Traceback" not in caplog.text
