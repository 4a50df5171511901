"""The programs of Dynamo's guides run, with their import lines changed by the table alone."""

import asyncio
import importlib.util
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import pytest

from tandem.models.paths import BUNDLED_MODEL
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.discovery import models_prefix
from tandem.runtime.errors import IncompleteError, InvalidRequestError
from tandem.sdk import (
    Client,
    Context,
    DistributedRuntime,
    KvEventPublisher,
    KvMetricsAggregator,
)
from tandem.sdk.conformance.kit import run_conformance
from tandem.sdk.service.instance import serve_service
from tandem.sdk.service.spec import spec_of
from tests.sdk.dynamo import seed_frames
from tests.sdk.dynamo.seed_frames import ROOT, blocks, ported
from tests.sdk.kit_pair import PATIENCE_S, Pair, data_of

pytestmark = pytest.mark.skipif(
    seed_frames.seeds() is None, reason="no guides: neither TANDEM_SEEDS nor ../shared/seeds"
)

MODEL = "Qwen/Qwen3-0.6B"
Load = Callable[[str, str], ModuleType]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Imports a program under a name, from a file, with its imports ported."""

    def load_module(source: str, name: str) -> ModuleType:
        path = tmp_path / f"{name}.py"
        path.write_text(ported(source))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load_module


@pytest.fixture
async def caller(runtime_config: RuntimeConfig) -> AsyncIterator[DistributedRuntime]:
    async with DistributedRuntime(runtime_config) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub's cache that has the guides' model: the bundled one under its name."""
    cache = tmp_path_factory.mktemp("hub")
    repository = cache / f"models--{MODEL.replace('/', '--')}"
    revision = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / revision).symlink_to(BUNDLED_MODEL)
    return cache


@asynccontextmanager
async def process(
    config: RuntimeConfig, hub: Path, folder: Path, *arguments: str
) -> AsyncIterator[Process]:
    """A program in a process of its own, which finds the cluster by its environment."""
    environment = os.environ | {
        "NATS_SERVER": config.nats_url,
        "ETCD_ENDPOINTS": config.etcd_endpoints,
        "TANDEM_RUNTIME__NAMESPACE": config.namespace,
        "HF_HUB_CACHE": str(hub),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": f"{ROOT / 'build' / 'typing'}:{os.environ.get('PYTHONPATH', '')}:{folder}",
    }
    running = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=folder, env=environment, stdout=PIPE, stderr=PIPE
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


async def client_of(caller: DistributedRuntime, path: str) -> Client:
    client = await caller.endpoint(path).client()
    await client.wait_for_instances(2 * PATIENCE_S)
    return client


async def end(running: Process) -> None:
    running.send_signal(signal.SIGTERM)
    _, errors = await asyncio.wait_for(running.communicate(), 2 * PATIENCE_S)
    assert running.returncode == 0, errors.decode()


@asynccontextmanager
async def service(config: RuntimeConfig, cls: type) -> AsyncIterator[DistributedRuntime]:
    """An instance of a service class, served; its runtime."""
    async with DistributedRuntime(config) as runtime:
        serving = asyncio.create_task(serve_service(runtime, cls))
        try:
            yield runtime
        finally:
            runtime.shutdown()
            await serving


def test_every_block_is_run_here_or_is_no_program() -> None:
    run = {
        "000": {0, 3, 4},
        "002": {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 14, 15},
        "003": {4, 5, 6, 7, 8, 9, 10, 11, 13},
    }
    for seed, numbers in run.items():
        others = {number for of, number in seed_frames.NO_PROGRAMS if of == seed}
        assert numbers | others == set(range(len(blocks(seed)))) and not numbers & others
        for number in others:
            with pytest.raises(SyntaxError):
                compile(blocks(seed)[number], seed, "exec")


def test_the_newest_guide_has_the_programs_of_the_one_before() -> None:
    before = [block.split() for block in blocks("003")]
    printed = seed_frames.numbered_blocks("004")
    assert len(printed) == 10
    assert all(block.split() in before for block in printed)


# ---- workers (000, 001) -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", ["000", "001"])
async def test_the_worker_registers_its_model_serves_and_ends(
    seed: str, runtime_config: RuntimeConfig, caller: DistributedRuntime, hub: Path, tmp_path: Path
) -> None:
    printed = blocks("000")[0] if seed == "000" else seed_frames.unfenced_program("001")
    (tmp_path / "program.py").write_text(ported(seed_frames.worker_program(printed)))
    async with process(runtime_config, hub, tmp_path, "program.py") as running:
        client = await client_of(caller, "namespace.component.endpoint")
        cards = await caller.discovery.get_prefix(models_prefix(runtime_config.namespace))
        (card,) = [json.loads(value) for value in cards.values()]
        assert card["name"] == MODEL and card["endpoint"] == "namespace.component.endpoint"
        assert await data_of(await client.generate({"token_ids": [1]})) == []
        await end(running)
    assert not await caller.discovery.get_prefix(models_prefix(runtime_config.namespace))


async def test_generator_exit_ends_the_stream_as_incomplete(pair: Pair, load: Load) -> None:
    program = load(seed_frames.handler(blocks("000")[3]), "seed_migration")
    client = await pair.serve(program.RequestHandler().generate)
    said: list[int] = []
    with pytest.raises(IncompleteError, match="Worker shutting down"):
        async for item in await client.generate({"count": 5}):
            said += item.data()["token_ids"]
    assert said == [0, 1]


async def test_a_handler_that_takes_a_context_sees_that_it_is_stopped(
    pair: Pair, load: Load
) -> None:
    program = load(seed_frames.handler(blocks("000")[4]), "seed_cancellation")
    client = await pair.serve(program.RequestHandler().generate)
    context = Context()
    said = 0
    async for _ in await client.generate({"count": 1_000_000}, context=context):
        said += 1
        context.stop_generating()
    assert 1 <= said < 1_000_000


# ---- services (002) ---------------------------------------------------------------------------


async def test_the_skeleton_and_the_chat_worker_are_served_under_their_names(
    runtime_config: RuntimeConfig, caller: DistributedRuntime, load: Load
) -> None:
    program = load(seed_frames.skeleton(blocks("002")[0]), "seed_skeleton")
    async with service(runtime_config, program.YourWorker):
        client = await client_of(caller, "your_namespace/YourWorker/your_endpoint")
        assert await data_of(await client.generate({"text": "hello"})) == []
        with pytest.raises(InvalidRequestError, match="text"):
            await data_of(await client.generate({"texts": "hello"}))
    program = load(seed_frames.chat_worker(blocks("002")[2]), "seed_chat_worker")
    async with service(runtime_config, program.YourLLMWorker):
        path = "your_namespace.YourLLMWorker.my_chat_completions_endpoint"
        client = await client_of(caller, path)
        assert await data_of(await client.generate({"model": "m"})) == []


async def test_the_client_prints_what_the_basic_worker_streams(
    runtime_config: RuntimeConfig, hub: Path, tmp_path: Path, load: Load
) -> None:
    worker = load(seed_frames.basic_worker(blocks("002")[3]), "basic_worker")
    (tmp_path / "client.py").write_text(ported(blocks("002")[4]))
    async with (
        service(runtime_config, worker.YourWorker),
        process(runtime_config, hub, tmp_path, "client.py") as client,
    ):
        printed, errors = await asyncio.wait_for(client.communicate(), 2 * PATIENCE_S)
    assert client.returncode == 0, errors.decode()
    assert printed.decode().splitlines() == ['{"text":"Hello,"}', '{"text":"Dynamo!"}']


def test_the_types_stand_alone(load: Load) -> None:
    assert load(blocks("002")[1], "seed_types").RequestType(text="x").model_dump() == {"text": "x"}


async def test_best_practices_are_a_service_with_resources_and_one_that_waits(
    runtime_config: RuntimeConfig, caller: DistributedRuntime, load: Load
) -> None:
    spec = spec_of(load(seed_frames.resources(blocks("002")[14]), "seed_resources").Worker)
    assert spec.resources.num_gpus == 1
    program = load(seed_frames.io_worker(blocks("002")[15]), "seed_io")
    async with service(runtime_config, program.Worker):
        client = await client_of(caller, "your_namespace.Worker.generate")
        assert await data_of(await client.generate({})) == [{"result": None}]


async def test_the_router_chooses_by_the_metrics_and_blocks_that_the_worker_publishes(
    runtime_config: RuntimeConfig, caller: DistributedRuntime, load: Load
) -> None:
    printed = blocks("002")
    worker = load(printed[5], "kv_metrics_worker").YourWorker
    router = load(seed_frames.router(printed[6], printed[7]), "seed_router").Router
    async with service(runtime_config, worker) as serving, service(runtime_config, router):
        component = serving.namespace("your_namespace").component("YourWorker")
        tokens = list(range(8))
        KvEventPublisher(component, 4).publish_stored(tokens, block_hashes=[1, 2])
        texts = await client_of(caller, "your_namespace.YourWorker.generate")
        words = await data_of(await texts.generate({"text": "two words"}))
        assert [json.loads(word)["text"] for word in words] == ["two", "words"]
        aggregator = KvMetricsAggregator(caller.namespace("your_namespace").component("YourWorker"))
        (metrics,) = (await aggregator.get_metrics()).endpoints
        assert metrics.worker_id == serving.instance_id
        assert metrics.request_total_slots == metrics.kv_total_blocks == 1024
        await aggregator.close()
        choices = await client_of(caller, "your_namespace.Router.generate")
        assert await data_of(await choices.generate({"tokens": tokens})) == [serving.instance_id]


# ---- KV blocks between agents (002) ------------------------------------------------------------


async def test_the_connector_moves_blocks_and_notifies(load: Load) -> None:
    torch = pytest.importorskip("torch")
    printed = blocks("002")
    program = load(seed_frames.connector(*printed[8:12]), "seed_connector")
    prefill, decode = program.NixlConnector("prefill", 0), program.NixlConnector("decode", 0)
    try:
        caches = {"prefill": torch.arange(4 * 2 * 2 * 8.0).reshape(4, 2, 2, 8)}
        caches["decode"] = torch.zeros(20, 2, 2, 8)
        prefill.register_kv_caches(caches["prefill"])
        decode.register_kv_caches(caches["decode"])
        metadata, descriptors = decode.get_agent_metadata()
        prefill.add_remote_agent(decode.engine_id, metadata, descriptors)
        prefill.write_blocks([0, 3], [12, 16], "kv_transfer")
        notes: dict[str, list[bytes]] = {}
        async with asyncio.timeout(PATIENCE_S):
            while not notes:
                await asyncio.sleep(0.005)
                notes = decode.nixl_wrapper.get_new_notifs()
        assert list(notes.values()) == [[b"kv_transfer"]]
        assert torch.equal(caches["decode"][[12, 16]], caches["prefill"][[0, 3]])
        assert not caches["decode"][:12].any()
    finally:
        prefill.nixl_wrapper.close()
        decode.nixl_wrapper.close()


# ---- engines (003, 004) -----------------------------------------------------------------------


def backend() -> str:
    return seed_frames.engine_module(*blocks("003")[4:10])


async def test_the_engine_conforms_and_its_own_tests_pass(load: Load) -> None:
    my_backend = load(backend(), "my_backend")
    tests = load(blocks("003")[13], "seed_engine_tests")
    await tests.test_generate_emits_terminal_chunk()
    await tests.test_generate_observes_cancellation()
    await run_conformance(my_backend.MyBackend)


async def test_the_engine_runs_as_a_process(
    runtime_config: RuntimeConfig, caller: DistributedRuntime, hub: Path, tmp_path: Path
) -> None:
    package = tmp_path / "my_backend"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "engine.py").write_text(ported(backend()))
    (package / "main.py").write_text(ported(blocks("003")[10]))
    command = ("-m", "my_backend.main", "--model-name", MODEL, "--namespace", "dynamo")
    async with process(runtime_config, hub, tmp_path, *command) as running:
        client = await client_of(caller, "dynamo.backend.generate")
        request = {"token_ids": [1, 2], "stop_conditions": {"max_tokens": 2}}
        chunks = await data_of(await client.generate(request))
        assert [chunk["token_ids"] for chunk in chunks] == [[7], [7]]
        assert chunks[-1]["completion_usage"]["total_tokens"] == 4
        await end(running)


async def test_a_typed_error_of_a_handler_reaches_its_caller(pair: Pair, load: Load) -> None:
    program = load(seed_frames.refusing_handler(blocks("003")[11]), "seed_errors")
    client = await pair.serve(program.Handler().generate)
    with pytest.raises(InvalidRequestError, match="empty prompt"):
        await data_of(await client.generate({"token_ids": []}))
