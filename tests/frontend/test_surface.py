"""Everything but generating: models, health, metrics; joining and leaving workers."""

import asyncio
import socket
from typing import Any

import msgspec
import pytest

from tandem.frontend.config import FrontendConfig
from tandem.frontend.serving.server import FrontendServer
from tandem.router.config import RouterConfig
from tandem.runtime.bus.events import MemoryEvents, kv_subject, load_subject
from tandem.runtime.errors import ConfigError
from tandem.runtime.store.discovery import MemoryDiscovery, models_prefix
from tandem.runtime.wire.block_hash import block_hashes
from tandem.runtime.wire.cluster_messages import KvEvent, LoadReport, StepCosts
from tandem.runtime.wire.messages import encode
from tests.frontend.frontend_stack import MODEL, Stack, model_files, token_ids
from tests.services import eventually

NO_NUMBERS = ("instance_id", "epoch", "role", "costs")
LOAD_NUMBERS = [name for name in LoadReport.__struct_fields__ if name not in NO_NUMBERS]


async def test_health_follows_the_workers() -> None:
    async with Stack(num_workers=0) as stack:
        assert (await stack.http.get("/live")).status_code == 200
        response = await stack.http.get("/health")
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        worker = await stack.add_worker()
        await eventually(lambda: bool(stack.server.catalog.models))
        response = await stack.http.get("/health")
        assert response.status_code == 200 and response.json()["models"] == [MODEL]
        assert (await stack.http.get(f"/v1/models/{MODEL}/ready")).status_code == 200
        await worker.leave()
        await eventually(lambda: not stack.server.catalog.models)
        assert (await stack.http.get("/health")).status_code == 503
        assert (await stack.http.get(f"/v1/models/{MODEL}/ready")).status_code == 503
        assert (await stack.http.get("/v1/models/none/ready")).status_code == 404


async def test_a_model_is_described_with_its_context(stack: Stack) -> None:
    expected = {
        "id": MODEL,
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "tandem",
        "max_model_len": 128,
    }
    assert (await stack.http.get("/v1/models")).json() == {"object": "list", "data": [expected]}
    assert (await stack.http.get(f"/v1/models/{MODEL}")).json() == expected
    assert (await stack.http.get("/v1/models/none")).status_code == 404


async def test_every_answer_has_a_request_id(stack: Stack) -> None:
    for method, path in [
        ("GET", "/live"),
        ("GET", "/v1/models/none"),
        ("GET", "/nothing"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/completions"),
    ]:
        own = await stack.http.request(method, path, headers={"x-request-id": "mine"})
        assert own.headers["x-request-id"] == "mine"
        other = await stack.http.request(method, path)
        assert len(other.headers["x-request-id"]) == 16
        assert (await stack.chat()).headers["x-request-id"]


PAGE = {"origin": "https://page.example"}
PREFLIGHT = PAGE | {
    "access-control-request-method": "POST",
    "access-control-request-headers": "content-type",
}


async def test_a_web_page_may_not_call_by_default(stack: Stack) -> None:
    response = await stack.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert response.status_code == 405
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    "origins", ["https://page.example", "https://a.example, https://page.example", "*"]
)
async def test_a_web_page_of_a_listed_origin_may_call(origins: str) -> None:
    async with Stack(config=FrontendConfig(port=0, cors_origins=origins)) as stack:
        asked = await stack.http.options("/v1/chat/completions", headers=PREFLIGHT)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] in ("https://page.example", "*")
        body = {"model": MODEL, "prompt": "Hi", "stream": True}
        response = await stack.http.post("/v1/completions", json=body, headers=PAGE)
        assert response.text.endswith("[DONE]\n\n")
        assert response.headers["access-control-allow-origin"] in ("https://page.example", "*")
        other = PREFLIGHT | {"origin": "https://other.example"}
        if origins != "*":
            assert (await stack.http.options("/v1/models", headers=other)).status_code == 400


@pytest.mark.parametrize("origins", ["https://page.example", "*", "https://other.example"])
async def test_a_web_page_may_read_why_its_head_was_too_large(origins: str) -> None:
    config = FrontendConfig(port=0, cors_origins=origins, max_head_bytes=1024)
    async with Stack(config=config) as stack:
        headers = PAGE | {"x-large": "x" * 1024}
        response = await stack.http.post("/v1/completions", json={}, headers=headers)
    assert response.status_code == 431
    allowed = {"*": "*", "https://page.example": "https://page.example"}.get(origins)
    assert response.headers.get("access-control-allow-origin") == allowed


async def test_every_path_is_served_with_a_slash_at_its_end(stack: Stack) -> None:
    posted = list(stack.server.handler.apis)
    gotten = ["/live", "/health", "/version", "/metrics", "/metrics/targets", "/v1/models"]
    gotten += [f"/v1/models/{MODEL}", f"/v1/models/{MODEL}/ready", "/v1/responses/none"]
    for method, paths in (("POST", posted), ("GET", gotten)):
        for path in paths:
            plain = await stack.http.request(method, path, json={})
            for end in ("/", "//"):
                response = await stack.http.request(method, path + end, json={})
                assert response.status_code == plain.status_code, path + end
                if path != "/metrics":
                    assert response.text == plain.text
    assert (await stack.http.get("/")).status_code == 404


async def test_metrics_count_what_happened(stack: Stack) -> None:
    await stack.chat()
    await stack.chat(max_tokens=0)
    text = (await stack.http.get("/metrics")).text
    path = 'endpoint="/v1/chat/completions"'
    for line in (
        f'tandem_frontend_requests_total{{{path},model="{MODEL}",status="200"}} 1.0',
        f'tandem_frontend_requests_total{{{path},model="",status="400"}} 1.0',
        f'tandem_frontend_prefill_total{{model="{MODEL}",place="local"}} 1.0',
        f'tandem_frontend_time_to_first_token_seconds_count{{model="{MODEL}"}} 1.0',
        f'tandem_frontend_request_duration_seconds_count{{model="{MODEL}"}} 1.0',
        f'tandem_frontend_cached_tokens_bucket{{le="2",model="{MODEL}"}} 1.0',
        f'tandem_frontend_decode_workers{{model="{MODEL}"}} 1.0',
    ):
        assert line in text, line


async def test_a_model_without_a_worker_left_has_zero_of_them_in_the_metrics(stack: Stack) -> None:
    line = f'tandem_frontend_decode_workers{{model="{MODEL}"}}'
    assert f"{line} 1.0" in (await stack.http.get("/metrics")).text
    await stack.worker.leave()
    await eventually(lambda: not stack.server.catalog.models)
    assert f"{line} 0.0" in (await stack.http.get("/metrics")).text


async def test_the_frontend_is_known_and_listens_while_it_serves(stack: Stack) -> None:
    (key,) = [key for key in stack.store.items if "/instances/frontend/" in key]
    assert stack.server.address in stack.store.items[key].decode()
    assert stack.listeners
    await stack.server.stop()
    assert not [key for key in stack.store.items if "/instances/frontend/" in key]
    assert not stack.listeners


async def test_a_start_that_was_broken_off_is_drained(stack: Stack) -> None:
    is_known = asyncio.Event()

    class WithoutAnswer(MemoryDiscovery):
        async def put(self, key: str, value: bytes) -> None:
            await super().put(key, value)
            is_known.set()
            await asyncio.Event().wait()

    node = stack.node()
    node.discovery = WithoutAnswer(stack.store)
    server = FrontendServer(stack.config, stack.router, node)
    starting = asyncio.create_task(server.start())
    await is_known.wait()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert [key for key in stack.store.items if server.instance_id in key]
    await server.drain()
    assert not [key for key in stack.store.items if server.instance_id in key]
    await server.stop()


async def test_a_port_that_is_taken_is_a_config_error(stack: Stack) -> None:
    port = int(stack.server.address.rpartition(":")[2])
    server = FrontendServer(FrontendConfig(port=port), RouterConfig(), stack.node())
    with pytest.raises(ConfigError, match=str(port)):
        await server.start()
    await server.stop()


async def test_a_descriptor_that_does_not_listen_is_a_config_error(stack: Stack) -> None:
    with socket.socket() as idle:
        server = FrontendServer(
            FrontendConfig(listen_fd=idle.fileno()), RouterConfig(), stack.node()
        )
        with pytest.raises(ConfigError, match="it does not listen"):
            await server.start()
        await server.stop()


async def test_requests_follow_the_prefix_and_the_events_that_move_it() -> None:
    prompt = token_ids("the world, " * 10)
    hashes = block_hashes(prompt, 4)
    assert len(hashes) > 3
    async with Stack(num_workers=0) as stack:
        one = await stack.add_worker(held=hashes, last_event_id=3)
        two = await stack.add_worker()
        index = stack.server.router.index
        await eventually(lambda: len(stack.server.catalog.instances) == 2)
        await eventually(lambda: bool(stack.server.catalog.models and index.match(hashes)))
        events = MemoryEvents(stack.listeners)
        await events.start()

        async def served_by() -> set[str]:
            answers = [await stack.complete(prompt=prompt, max_tokens=9) for _ in range(3)]
            return {answer.headers["x-tandem-decode-instance"] for answer in answers}

        assert await served_by() == {one.instance_id}
        cleared = KvEvent(one.instance_id, "epoch", 4, cleared=True)
        events.publish(kv_subject("tandem", one.instance_id), encode(cleared))
        assert not index.match(hashes)
        two.held, two.last_event_id = hashes, 9  # what a snapshot will say after the gap
        gap = KvEvent(two.instance_id, "epoch", 9, stored=hashes[:1])
        events.publish(kv_subject("tandem", two.instance_id), encode(gap))
        await eventually(lambda: bool(index.match(hashes)))
        assert await served_by() == {two.instance_id}


async def test_a_prompt_is_hashed_only_where_its_prefix_can_be_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = token_ids("the world, " * 10)
    hashed: list[list[bytes]] = []

    def hashes_of(*args: Any, **fields: Any) -> list[bytes]:
        hashed.append(block_hashes(*args, **fields))
        return hashed[-1]

    monkeypatch.setattr("tandem.frontend.generation.plan.block_hashes", hashes_of)
    async with Stack(num_workers=2) as stack:
        assert (await stack.complete(prompt=prompt, max_tokens=9)).status_code == 200
        assert hashed == []
        holder = stack.workers[1]
        stored = KvEvent(holder.instance_id, "epoch", 1, stored=block_hashes(prompt, 4))
        holder.events.publish(kv_subject("tandem", holder.instance_id), encode(stored))
        index = stack.server.router.index
        await eventually(lambda: index.holds_any([holder.instance_id]))
        answer = await stack.complete(prompt=prompt, max_tokens=9)
        assert answer.headers["x-tandem-decode-instance"] == holder.instance_id
        assert hashed == [stored.stored]


async def test_a_worker_with_other_files_gets_no_requests() -> None:
    async with Stack() as stack:
        other = await stack.add_worker(files=model_files("{{ messages }}"))
        for _ in range(4):
            assert (await stack.chat()).status_code == 200
        assert not other.requests
        await stack.worker.leave()
        while (await stack.chat()).status_code != 200:
            await asyncio.sleep(0.01)
        assert other.requests


async def test_malformed_records_and_events_are_passed_over(stack: Stack) -> None:
    stack.store.set(models_prefix("tandem") + "x/broken", b"{")
    events = MemoryEvents(stack.listeners)
    await events.start()
    events.publish(kv_subject("tandem", stack.worker.instance_id), b"\xc1")
    events.publish(load_subject("tandem", stack.worker.instance_id), b"\xc1")
    assert (await stack.chat()).status_code == 200


@pytest.mark.parametrize(
    "lie",
    [
        {"num_decodes": 1, "decode_context": -(10**12)},
        dict.fromkeys(LOAD_NUMBERS, -(10**12)),
        dict.fromkeys(LOAD_NUMBERS, 2**62),
        dict.fromkeys(LOAD_NUMBERS, 0),
        {"costs": StepCosts((0.0,) * 3, (0.0,) * 3, 0.0, 1, 1, has_target=True)},
    ],
    ids=["negative", "all negative", "huge", "zeros", "free"],
)
async def test_a_worker_that_lies_about_its_load_fails_no_request(
    lie: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    costs = StepCosts((0.01, 0.001, 0.0), (0.002, 0.001, 0.0), 0.1, 2048, 512)
    async with Stack(num_workers=3) as stack:
        events = MemoryEvents(stack.listeners)
        await events.start()
        for number in range(12):
            for worker in stack.workers:
                name = worker.instance_id
                load = LoadReport(name, "e", "both", 1, 0, 40, 9, 5, 0, 1, 99, costs=costs)
                if worker is stack.workers[0]:
                    load = msgspec.structs.replace(load, **lie)
                events.publish(load_subject("tandem", name), encode(load))
            prompt = token_ids("the world" + " x" * (number % 9))
            assert (await stack.complete(prompt=prompt, max_tokens=9)).status_code == 200
    assert [each for each in caplog.records if each.levelname == "ERROR"] == []


async def test_the_choice_of_a_worker_shows_its_prediction() -> None:
    costs = StepCosts((0.01, 0.001, 0.0), (0.002, 0.001, 0.0), 0.1, 2048, 512)
    async with Stack(num_workers=2) as stack:
        events = MemoryEvents(stack.listeners)
        await events.start()
        busy, idle = (worker.instance_id for worker in stack.workers)
        for name, num_waiting_tokens in ((busy, 400), (idle, 0)):
            load = LoadReport(name, "e", "both", 0, 0, num_waiting_tokens, 9, 9, 0, costs=costs)
            events.publish(load_subject("tandem", name), encode(load))
        for _ in range(3):
            answer = await stack.complete(prompt=token_ids("the world"), max_tokens=9)
            assert answer.headers["x-tandem-decode-instance"] == idle
            reason = answer.headers["x-tandem-decode-reason"]
            # one block of 4 tokens
            assert reason.startswith("first token in 6.0 ms, all answers' delays 6.0; 1 of 2")
        text = (await stack.http.get("/metrics")).text
        assert f'tandem_frontend_prediction_error_count{{model="{MODEL}"}} 3.0' in text
