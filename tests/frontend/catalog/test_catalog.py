"""What the frontend takes as served, from cards and instances of many endpoints."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tandem.frontend.config import FrontendConfig
from tandem.frontend.serving.server import FrontendServer
from tandem.runtime.bus.events import kv_subject
from tandem.runtime.context import RequestContext
from tandem.runtime.plane.server import Responder
from tandem.runtime.store.discovery import MemoryDiscovery, register_instance, register_model
from tandem.runtime.wire.cluster_messages import KvEvent
from tandem.runtime.wire.messages import encode
from tests.frontend.frontend_stack import (
    MODEL,
    FakeWorker,
    Stack,
    model_files,
    prompt_tokens,
    token_ids,
)
from tests.frontend.text.text_stack import add_text_worker, delta, says
from tests.services import eventually


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with Stack(num_workers=0) as running:
        yield running


async def add(stack: Stack, model: str, endpoint: str) -> FakeWorker:
    worker = await stack.add_worker(model=model, endpoint=endpoint)
    await eventually(lambda: worker.instance_id in instances(stack, model))
    return worker


def instances(stack: Stack, model: str) -> set[str]:
    return {
        instance_id
        for served in stack.server.catalog.models
        if served.card.name == model
        for instance_id in served.instances
    }


async def answered_by(stack: Stack, model: str) -> str:
    response = await stack.chat(model=model)
    assert response.status_code == 200, response.text
    return str(response.headers["x-tandem-decode-instance"])


async def test_models_of_several_endpoints_and_namespaces_go_each_to_their_own(
    stack: Stack,
) -> None:
    one = await add(stack, "one", "llama.backend.generate")
    two = await add(stack, "two", "qwen.backend.chat/completions")
    assert await answered_by(stack, "one") == one.instance_id
    assert await answered_by(stack, "two") == two.instance_id
    listed = (await stack.http.get("/v1/models")).json()["data"]
    assert {each["id"] for each in listed} == {"one", "two"}


async def test_a_model_leaves_with_its_last_instance_and_its_endpoint_is_forgotten(
    stack: Stack,
) -> None:
    first = await add(stack, MODEL, "a.b.c")
    second = await add(stack, MODEL, "a.b.c")
    num_views = len(stack.store.views)
    await first.leave()
    assert await answered_by(stack, MODEL) == second.instance_id
    await second.leave()
    assert (await stack.http.get("/v1/models")).json()["data"] == []
    await eventually(lambda: len(stack.store.views) == num_views - 1)


async def test_one_process_serves_several_models_and_one_model_several_endpoints(
    stack: Stack,
) -> None:
    worker = await add(stack, "one", "a.b.c")
    discovery = MemoryDiscovery(stack.store)
    await discovery.start()
    card = worker.card()
    await register_model(discovery, "tandem", msgspec.structs.replace(card, name="two"))
    other = await add(stack, "two", "x.y.z")
    await eventually(lambda: instances(stack, "two") == {worker.instance_id, other.instance_id})
    assert instances(stack, "one") == {worker.instance_id}
    seen = {await answered_by(stack, "two") for _ in range(20)}
    assert seen == {worker.instance_id, other.instance_id}
    assert {request.model for request in worker.requests} == {"two"}
    await discovery.close()
    assert instances(stack, "two") == {other.instance_id}
    assert await answered_by(stack, "one") == worker.instance_id


async def test_a_card_counts_once_its_instance_is_there_and_no_longer(stack: Stack) -> None:
    worker = await add(stack, MODEL, "a.b.c")
    key = "/tandem/a/instances/b/c/" + worker.instance_id
    record = stack.store.items[key]
    stack.store.set(key, None)
    assert instances(stack, MODEL) == set()
    assert not stack.server.catalog.instances
    stack.store.set(key, record)
    assert instances(stack, MODEL) == {worker.instance_id}


async def test_an_instance_without_a_card_gets_nothing(stack: Stack) -> None:
    worker = await add(stack, MODEL, "a.b.c")
    discovery = MemoryDiscovery(stack.store)
    await discovery.start()
    silent = msgspec.structs.replace(worker.instance(), instance_id="f" * 16)
    await register_instance(discovery, silent)
    await asyncio.sleep(0)
    assert set(stack.server.catalog.instances) == {worker.instance_id}
    await discovery.close()


async def test_a_card_whose_endpoint_is_no_name_is_passed_over(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await add(stack, MODEL, "a.b.c")
    broken = msgspec.structs.replace(worker.card(), name="broken", endpoint="")
    stack.store.set("/tandem/tandem/models/broken/x", msgspec.json.encode(broken))
    assert "'' is not namespace.component.endpoint" in caplog.text
    assert await answered_by(stack, MODEL) == worker.instance_id
    assert (await stack.chat(model="broken")).status_code == 404


async def test_text_workers_do_not_stand_in_for_token_workers_of_one_name(stack: Stack) -> None:
    tokens = await add(stack, MODEL, "a.b.c")
    text = await add_text_worker(stack, says(delta("text", "stop")), model=MODEL)
    for _ in range(4):
        assert await answered_by(stack, MODEL) == tokens.instance_id
    await tokens.leave()
    assert await answered_by(stack, MODEL) == text.instance_id


async def test_what_a_worker_tells_in_its_pipelines_namespace_moves_the_router(
    stack: Stack,
) -> None:
    worker = await add(stack, MODEL, "pipeline.backend.generate")
    index = stack.server.router.index
    hashes = [b"h" * 16]
    stored = KvEvent(worker.instance_id, "epoch", 1, stored=hashes)
    worker.events.publish(kv_subject("pipeline", worker.instance_id), encode(stored))
    await eventually(lambda: index.match(hashes) == {worker.instance_id: 1})
    stranger = KvEvent("f" * 16, "epoch", 1, stored=hashes)
    worker.events.publish(kv_subject("pipeline", "f" * 16), encode(stranger))
    assert index.match(hashes) == {worker.instance_id: 1}


class SlowWorker(FakeWorker):
    """A worker whose model files come when `gate` is open."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.gate = asyncio.Event()

    async def _model_files(
        self, payload: bytes, context: RequestContext, responder: Responder
    ) -> None:
        await self.gate.wait()
        await super()._model_files(payload, context, responder)


async def test_a_model_that_is_being_loaded_is_a_503_and_not_unknown(stack: Stack) -> None:
    worker = await stack.add_worker(SlowWorker)
    for response in (await stack.chat(), await stack.http.get(f"/v1/models/{MODEL}")):
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
    assert (await stack.chat(model="none")).status_code == 404
    worker.gate.set()
    await eventually(lambda: bool(stack.server.catalog.models))
    assert await answered_by(stack, MODEL) == worker.instance_id


async def test_a_frontend_answers_once_it_has_loaded_the_models_there_are(stack: Stack) -> None:
    worker = await stack.add_worker(SlowWorker)
    node = stack.node()
    await node.discovery.start()
    await node.events.start()
    server = FrontendServer(stack.config, stack.router, node)
    starting = asyncio.create_task(server.start())
    try:
        await asyncio.sleep(0.05)
        assert not starting.done()
        worker.gate.set()
        await starting
        assert [model.card.name for model in server.catalog.models] == [MODEL]
    finally:
        await server.stop()
        await node.client.close()


async def test_files_that_do_not_come_do_not_keep_a_frontend_from_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.frontend.catalog.catalog._FIRST_LOAD_S", 0.05)
    async with Stack(num_workers=0) as first:
        await first.add_worker(SlowWorker)
        async with Stack(num_workers=0, store=first.store) as stack:
            assert (await stack.chat()).status_code == 503


class ForgingWorker(FakeWorker):
    """A worker that sends other files than those whose digest its card has."""

    async def _model_files(
        self, _payload: bytes, _context: RequestContext, responder: Responder
    ) -> None:
        responder.send(encode(model_files("forged")))


async def test_files_that_do_not_have_the_digest_asked_for_are_not_used(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    forger = await stack.add_worker(ForgingWorker, instance_id="0" * 16)
    await eventually(lambda: "sent files with the digest" in caplog.text)
    assert (await stack.chat()).status_code == 503
    honest = await stack.add_worker()
    await eventually(lambda: bool(stack.server.catalog.models))
    assert (await stack.chat()).status_code == 200
    (request,) = forger.requests + honest.requests
    assert prompt_tokens(request) == token_ids(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_files_that_are_too_large_are_not_read(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tandem.frontend.catalog.model_texts._MAX_FILES_BYTES", 1024)
    await stack.add_worker()
    await eventually(lambda: "the most is 1024" in caplog.text)
    assert (await stack.chat()).status_code == 503


@pytest.mark.parametrize("fields", [{"block_size": 0}, {"context_length": 1}])
async def test_one_card_does_not_take_a_model_down(
    stack: Stack, fields: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    worker = await add(stack, MODEL, "a.b.c")
    false = msgspec.structs.replace(worker.card(), instance_id="0" * 16, **fields)
    instance = msgspec.structs.replace(worker.instance(), instance_id="0" * 16)
    discovery = MemoryDiscovery(stack.store)
    await discovery.start()
    await register_instance(discovery, instance)
    await register_model(discovery, "tandem", false)
    assert next(iter(fields)) in caplog.text
    for _ in range(3):
        assert await answered_by(stack, MODEL) == worker.instance_id
    await discovery.close()


async def test_a_frontend_that_has_just_started_knows_no_model_yet_and_says_so(
    stack: Stack,
) -> None:
    for path in ("/health", f"/v1/models/{MODEL}", f"/v1/models/{MODEL}/ready"):
        response = await stack.http.get(path)
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
    response = await stack.chat()
    assert response.status_code == 503 and "just started" in response.text
    worker = FakeWorker(stack.store, stack.listeners)
    early = MemoryDiscovery(stack.store)
    await register_model(early, "tandem", worker.card())  # before its instance
    response = await stack.chat()
    assert response.status_code == 503 and "being loaded" in response.text
    assert (await stack.chat(model="other")).status_code == 404
    await early.close()
    worker = await add(stack, MODEL, "a.b.c")
    assert await answered_by(stack, MODEL) == worker.instance_id
    assert (await stack.chat(model="other")).status_code == 404


async def test_a_frontend_that_has_run_for_a_while_without_a_worker_knows_no_model() -> None:
    async with Stack(num_workers=0, config=FrontendConfig(port=0, model_grace_s=600)) as stack:
        assert (await stack.chat()).status_code == 503
        stack.server.catalog._started_s -= 600
        response = await stack.chat()
        assert response.status_code == 404 and "none now" in response.text


async def test_a_model_without_a_worker_is_known_for_a_while_and_then_forgotten() -> None:
    config = FrontendConfig(port=0, model_grace_s=600, return_wait_s=0)
    async with Stack(config=config) as stack:
        await stack.worker.leave()
        unknown = (await stack.chat(model="other")).json()["error"]["message"]
        assert MODEL not in unknown and "none now" in unknown
        assert (await stack.http.get(f"/v1/models/{MODEL}")).status_code == 200
        response = await stack.chat()
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        last = await stack.add_worker()
        assert await answered_by(stack, MODEL) == last.instance_id
        stack.server.catalog._model_grace_s = 0.05
        await last.leave()
        while (await stack.chat()).status_code == 503:
            await asyncio.sleep(0.01)
        assert (await stack.chat()).status_code == 404
        for path in (f"/v1/models/{MODEL}", f"/v1/models/{MODEL}/ready"):
            assert (await stack.http.get(path)).status_code == 404
        worker = await stack.add_worker()
        await eventually(lambda: bool(stack.server.catalog.models))
        assert await answered_by(stack, MODEL) == worker.instance_id


async def test_a_worker_that_returns_in_time_keeps_its_model() -> None:
    async with Stack() as stack:
        await stack.worker.leave()
        departure = stack.server.catalog._departures[MODEL]
        worker = await stack.add_worker()
        assert await answered_by(stack, MODEL) == worker.instance_id
        assert departure.cancelled()
