"""The endpoint picker protocol over real gRPC, with a real frontend and fake workers."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.launch.epp.process import EppServer
from tandem.launch.epp.protos import Mode, ProcessingRequest
from tandem.runtime.bus.events import load_subject
from tandem.runtime.wire.block_hash import block_hashes
from tandem.runtime.wire.cluster_messages import LoadReport
from tandem.runtime.wire.messages import encode
from tests.frontend.frontend_stack import MODEL, Stack, token_ids
from tests.launch.epp.gateway import (
    Gateway,
    add_frontend,
    channel_to,
    endpoint_of,
    frontend_config,
    mutations_of,
    picker_of,
    status_of,
)
from tests.services import eventually

LONG_PROMPT = "hello there world " * 3


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    """A frontend and two workers, one of which holds the blocks of LONG_PROMPT."""
    async with Stack(num_workers=0) as running:
        held = block_hashes(token_ids(LONG_PROMPT), 4)
        await running.add_worker()
        await running.add_worker(held=held)
        await eventually(lambda: running.num_known == 2)
        yield running


@pytest.fixture
async def server(stack: Stack) -> AsyncIterator[EppServer]:
    async with picker_of(stack) as running:
        holder = stack.workers[1].instance_id
        await eventually(lambda: running.picker.router.heeds_prefix([holder, "other"]))
        yield running


@pytest.fixture
async def channel(server: EppServer) -> AsyncIterator[Any]:
    async with channel_to(server) as running:
        yield running


async def is_idle(server: EppServer) -> None:
    """No request is left, nor any of a body."""
    picker = server.picker
    await eventually(lambda: picker._requests.num_taken == server._bodies.num_taken == 0)
    assert not picker.router._requests and not picker._by_load._requests


@pytest.mark.parametrize("mode", [Mode.FULL_DUPLEX_STREAMED, None])
async def test_the_worker_with_the_prefix_is_named_to_the_frontend(
    stack: Stack, server: EppServer, channel: Any, mode: int | None
) -> None:
    for _ in range(3):
        gateway = Gateway(channel, mode)
        answer = await gateway.ask(LONG_PROMPT)
        assert endpoint_of(answer) == stack.server.address
        named = mutations_of(answer)["x-tandem-worker"]
        assert named == stack.workers[1].instance_id
        response = await stack.complete(prompt=LONG_PROMPT, headers={"x-tandem-worker": named})
        assert response.headers["x-tandem-decode-instance"] == named
        await gateway.end()
    await is_idle(server)


async def test_the_worker_without_load_is_named_until_requests_end(
    stack: Stack, server: EppServer, channel: Any
) -> None:
    gateways = [Gateway(channel) for _ in range(4)]
    names = Counter([mutations_of(await each.ask())["x-tandem-worker"] for each in gateways])
    assert names == {worker.instance_id: 2 for worker in stack.workers}
    busy = stack.workers[0].instance_id
    report = LoadReport(busy, "epoch", "decode", 9, 9, 9000, 1000, 10, 0)
    stack.workers[0].events.publish(load_subject("tandem", busy), encode(report))
    others = [Gateway(channel) for _ in range(3)]
    assert {mutations_of(await each.ask())["x-tandem-worker"] for each in others} == {
        stack.workers[1].instance_id
    }
    for each in gateways + others:
        await each.end()
    await is_idle(server)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_every_shape_of_a_chat_has_its_worker(stack: Stack, channel: Any, path: str) -> None:
    key = "input" if path == "/v1/responses" else "messages"
    body = {"model": MODEL, key: [{"role": "user", "content": "Hi"}], "max_tokens": 9}
    if path == "/v1/responses":
        del body["max_tokens"]
    gateway = Gateway(channel)
    await gateway.head(path)
    await gateway.body(json.dumps(body).encode())
    named = mutations_of(await gateway.read())["x-tandem-worker"]
    assert named in {worker.instance_id for worker in stack.workers}


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", b'{"model": "unknown", "prompt": "Hi"}'),
        ("/v1/completions", b'{"model": "test/model", "prompt": 7}'),
        ("/v1/completions", b'{"model": "test/model", "prompt": "%s"}' % (b"word " * 500)),
        ("/v1/completions", b"no JSON \xff"),
        ("/v1/completions", b""),
        ("/v1/responses", b'{"model": "test/model", "input": "a", "previous_response_id": "r"}'),
        ("/v1/embeddings", b'{"model": "test/model", "input": "Hi"}'),
        ("/elsewhere", b"{}"),
    ],
)
async def test_a_request_at_fault_or_for_no_worker_is_left_to_a_frontend(
    stack: Stack, server: EppServer, channel: Any, path: str, body: bytes
) -> None:
    gateway = Gateway(channel)
    await gateway.head(path, x_tandem_worker="a-client-named-it")
    await gateway.body(body)
    answer = await gateway.read()
    assert endpoint_of(answer) == stack.server.address
    assert mutations_of(answer)["x-tandem-worker"] == "", "no client names a worker"
    assert await gateway.streamed() == body
    await gateway.end()
    await is_idle(server)


async def test_without_a_frontend_the_answer_is_503(stack: Stack, channel: Any) -> None:
    await stack.server._node.withdraw()
    gateway = Gateway(channel)
    answer = await gateway.ask()
    assert status_of(answer) == 503
    assert json.loads(answer.immediate_response.body)["error"]["code"] == "unavailable"
    assert await gateway.call.read() is grpc.aio.EOF and await gateway.call.code() == (
        grpc.StatusCode.OK
    )


async def test_only_frontends_of_the_subset_are_picked(
    stack: Stack, server: EppServer, channel: Any
) -> None:
    nodes = [await add_frontend(stack, f"10.0.0.{number}:8000") for number in (1, 2)]
    await eventually(lambda: len(server.picker._endpoints) == 3)
    for subset, expected in (
        (["10.0.0.1:8000"], {"10.0.0.1:8000"}),
        ("10.0.0.1:8000, 10.0.0.2:8000", {"10.0.0.1:8000", "10.0.0.2:8000"}),
        (["10.0.0.2", "10.0.0.9:8000"], {"10.0.0.2:8000"}),
    ):
        gateways = [Gateway(channel) for _ in range(4)]
        assert {endpoint_of(await each.ask(subset=subset)) for each in gateways} == expected
        for each in gateways:
            await each.end()
        await is_idle(server)
    for nothing in ([], "", ["10.0.0.1:80", "10.0.0.9"]):
        assert status_of(await Gateway(channel).ask(subset=nothing)) == 503
    for node in nodes:
        await node.discovery.close()
    await eventually(lambda: len(server.picker._endpoints) == 1)
    assert endpoint_of(await Gateway(channel).ask()) == stack.server.address


async def test_requests_are_shared_by_the_frontends_and_names_are_no_endpoints(
    stack: Stack, server: EppServer, channel: Any
) -> None:
    await add_frontend(stack, "https://10.0.0.1:8443")
    await add_frontend(stack, "[fd00::1]:8000")
    await add_frontend(stack, "a-name.example:8000")
    endpoints = {stack.server.address, "10.0.0.1:8443", "[fd00::1]:8000"}
    await eventually(lambda: set(server.picker._endpoints.values()) == endpoints)
    gateways = [Gateway(channel) for _ in range(9)]
    picked = [endpoint_of(await each.ask()) for each in gateways]
    assert Counter(picked) == dict.fromkeys(endpoints, 3)
    for gateway, endpoint in zip(gateways, picked, strict=True):
        if endpoint == "10.0.0.1:8443":
            await gateway.end()
    await eventually(lambda: server.picker._requests.num_taken == 6)
    assert {endpoint_of(await Gateway(channel).ask()) for _ in "12"} == {"10.0.0.1:8443"}


async def test_a_request_without_a_body_is_picked_for_at_once(stack: Stack, channel: Any) -> None:
    gateway = Gateway(channel)
    await gateway.head("/v1/models", is_end=True)
    assert endpoint_of(await gateway.read()) == stack.server.address


@pytest.mark.parametrize("mode", [Mode.BUFFERED, Mode.BUFFERED_PARTIAL])
async def test_a_buffered_body_names_a_worker(stack: Stack, channel: Any, mode: int) -> None:
    gateway = Gateway(channel, mode)
    await gateway.head()
    assert mutations_of(await gateway.read()) == {}
    await gateway.body(b'{"model": "%b", "prompt": "%b"}' % (MODEL.encode(), LONG_PROMPT.encode()))
    answer = await gateway.read()
    assert answer.WhichOneof("response") == "request_body"
    assert endpoint_of(answer) == stack.server.address
    assert mutations_of(answer)["x-tandem-worker"] == stack.workers[1].instance_id
    await gateway.send(response_headers={})
    assert (await gateway.read()).WhichOneof("response") == "response_headers"
    await gateway.send(response_body={"body": b"{}", "end_of_stream": True})
    answer = await gateway.read()
    assert answer.WhichOneof("response") == "response_body"
    assert not answer.response_body.HasField("response"), "nothing is changed"


@pytest.mark.parametrize("mode", [Mode.NONE, Mode.STREAMED])
async def test_where_the_headers_cannot_wait_a_frontend_is_picked_without_a_worker(
    stack: Stack, channel: Any, mode: int
) -> None:
    gateway = Gateway(channel, mode)
    await gateway.head()
    answer = await gateway.read()
    assert endpoint_of(answer) == stack.server.address
    assert mutations_of(answer)["x-tandem-worker"] == ""
    await gateway.body(b"{", b"}")
    for _ in range(2):
        answer = await gateway.read()
        assert answer.WhichOneof("response") == "request_body"
        assert not answer.request_body.HasField("response")


async def test_a_body_that_trailers_end_comes_back_before_them(channel: Any) -> None:
    gateway = Gateway(channel)
    await gateway.head()
    await gateway.body(b'{"model": "test/model",', b' "prompt": "Hi"}', is_end=False)
    await gateway.send(request_trailers={})
    answers = [await gateway.read() for _ in "123"]
    assert [each.WhichOneof("response") for each in answers] == [
        "request_headers", "request_body", "request_trailers",
    ]  # fmt: skip
    assert mutations_of(answers[0])["x-tandem-worker"]
    streamed = answers[1].request_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (
        b'{"model": "test/model", "prompt": "Hi"}', False,
    )  # fmt: skip


async def test_an_answer_passes_unchanged_while_it_is_generated(
    server: EppServer, channel: Any
) -> None:
    gateway = Gateway(channel)
    await gateway.ask()
    [request] = server.picker.router._requests.values()
    assert not request.is_prefilled
    await gateway.send(response_headers={})
    assert (await gateway.read()).WhichOneof("response") == "response_headers"
    assert request.is_prefilled
    for part in (b"data: 1\n\n", b"", b"x" * 200_000):
        await gateway.send(response_body={"body": part, "end_of_stream": len(part) > 9})
    assert await gateway.streamed("response_body") == b"data: 1\n\n" + b"x" * 200_000
    await gateway.send(response_trailers={})
    assert (await gateway.read()).WhichOneof("response") == "response_trailers"
    await gateway.end()
    await is_idle(server)


async def test_a_large_body_is_passed_on_and_not_kept() -> None:
    config = frontend_config(max_body_bytes=100_000, max_open_body_bytes=150_000)
    async with (
        Stack(config=config) as stack,
        picker_of(stack) as server,
        channel_to(server) as channel,
    ):
        gateway, part = Gateway(channel), b"x" * 60_000
        await gateway.head()
        await gateway.body(part, is_end=False)
        await eventually(lambda: server._bodies.num_taken == len(part))
        await gateway.body(part, part, part)
        answer = await gateway.read()
        assert endpoint_of(answer) == stack.server.address
        assert mutations_of(answer)["x-tandem-worker"] == ""
        assert await gateway.streamed() == part * 4
        assert server._bodies.num_taken == 0
        await gateway.end()
        waiting = [Gateway(channel) for _ in range(3)]
        for each in waiting:
            await each.head()
            await each.body(part, is_end=False)
        picked = [asyncio.create_task(each.read()) for each in waiting]
        await asyncio.wait(picked, return_when=asyncio.FIRST_COMPLETED)
        assert sum(each.done() for each in picked) == 1, "there is room for two"
        assert server._bodies.num_taken == 2 * len(part)
        for each in waiting:
            each.call.cancel()
        await asyncio.wait(picked)
        await is_idle(server)
        too_long = Gateway(channel)
        await too_long.head()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await too_long.body(b"x" * 1_000_000)  # the end may come before its last byte is out
        assert await too_long.call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await is_idle(server)


async def test_more_requests_than_the_limit_get_429(stack: Stack) -> None:
    async with picker_of(stack, max_requests=50) as server, channel_to(server) as channel:
        gateways = [Gateway(channel) for _ in range(80)]
        for each in gateways:
            await each.head("/v1/models", is_end=True)
        answers = await asyncio.gather(*(each.read() for each in gateways))
        kinds = Counter(each.WhichOneof("response") for each in answers)
        assert kinds == {"request_headers": 50, "immediate_response": 30}
        refused = [each for each in answers if each.WhichOneof("response") == "immediate_response"]
        assert {status_of(each) for each in refused} == {429}
        for gateway in gateways:
            gateway.call.cancel()
        await is_idle(server)
        assert endpoint_of(await Gateway(channel).ask())


@pytest.mark.parametrize("num_messages", [0, 1, 2, 3])
async def test_a_gateway_that_leaves_leaves_nothing_behind(
    server: EppServer, channel: Any, num_messages: int
) -> None:
    gateway = Gateway(channel)
    if num_messages:
        await gateway.head()
    if num_messages > 1:
        await gateway.body(b'{"model": "test/model", ', is_end=False)
    if num_messages > 2:
        await gateway.body(b'"prompt": "Hi"}')
        await gateway.read()
    else:
        await eventually(lambda: server.picker._requests.num_taken == (num_messages > 0))
    gateway.call.cancel()
    await is_idle(server)


async def test_a_body_that_does_not_come_ends_the_request() -> None:
    async with (
        Stack(config=frontend_config(body_timeout_s=0.2)) as stack,
        picker_of(stack) as server,
        channel_to(server) as channel,
    ):
        gateway = Gateway(channel)
        await gateway.head()
        assert await gateway.call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        slow = Gateway(channel)
        await slow.ask()
        await asyncio.sleep(0.4)  # the subject: an answer may take longer than a body
        await slow.send(response_headers={})
        assert (await slow.read()).WhichOneof("response") == "response_headers"
        await slow.end()
        await is_idle(server)


@pytest.mark.parametrize(
    "message", [ProcessingRequest(), ProcessingRequest(request_body={"body": b"{}"})]
)
async def test_messages_of_no_kind_or_out_of_order_end_the_request(
    server: EppServer, channel: Any, message: Any
) -> None:
    gateway = Gateway(channel)
    await gateway.call.write(message)
    assert await gateway.call.code() == grpc.StatusCode.INVALID_ARGUMENT
    await is_idle(server)


async def test_headers_beyond_the_bound_end_the_request(server: EppServer, channel: Any) -> None:
    gateway = Gateway(channel)
    await gateway.head(subset=["10.0.0.1:8000"] * 12_000, cookie="x" * 60_000)
    assert await gateway.call.code() == grpc.StatusCode.INVALID_ARGUMENT
    await is_idle(server)


async def test_headers_that_come_again_are_picked_for_once(server: EppServer, channel: Any) -> None:
    gateway = Gateway(channel)
    await gateway.ask()
    await gateway.head()
    assert mutations_of(await gateway.read()) == {}
    await gateway.end()
    await is_idle(server)


async def test_requests_with_a_wrong_api_key_are_not_read(stack: Stack) -> None:
    digest = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of `secret`
    stack.config = frontend_config(api_keys=f"team {digest}")
    async with picker_of(stack) as server, channel_to(server) as channel:
        for key, is_named in (("Bearer secret", True), ("Bearer wrong", False)):
            answer = await Gateway(channel).ask(authorization=key)
            assert endpoint_of(answer) == stack.server.address
            assert bool(mutations_of(answer)["x-tandem-worker"]) == is_named


async def test_a_prompt_that_takes_too_long_to_read_is_left_to_a_frontend(
    stack: Stack, server: EppServer, channel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stuck(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(server.picker._prompts, "read", stuck)
    answer = await Gateway(channel).ask()
    assert endpoint_of(answer) == stack.server.address
    assert mutations_of(answer)["x-tandem-worker"] == ""


async def test_health_is_told_until_the_picker_drains(server: EppServer, channel: Any) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    statuses = health_pb2.HealthCheckResponse
    for name in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == statuses.SERVING
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))
    assert (await watch.read()).status == statuses.SERVING
    gateway = Gateway(channel)
    await gateway.ask()
    draining = asyncio.create_task(server.drain(60))
    assert (await watch.read()).status == statuses.NOT_SERVING
    await gateway.send(response_headers={})
    assert (await gateway.read()).WhichOneof("response") == "response_headers"
    await gateway.end()
    watch.cancel()
    await draining
