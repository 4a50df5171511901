"""Streams over real sockets: order, errors, cancellation, flow control, drain."""

import asyncio

import pytest

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import (
    CancelledRequestError,
    ConnectionLostError,
    ContextLengthError,
    DeadlineError,
    InternalError,
    NotFoundError,
    OverloadedError,
    ProtocolError,
    ServiceError,
    UnavailableError,
)
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.plane.response_stream import WINDOW_ITEMS
from tandem.runtime.plane.server import Handler, RequestServer, Responder
from tandem.runtime.wire.bounds import MAX_TEXT
from tests.runtime.plane.ends import calling, serving
from tests.services import eventually, free_port

CONFIG = RuntimeConfig(connect_timeout_s=60.0)


def fail_with(error: Exception) -> Handler:
    async def handler(payload: bytes, context: RequestContext, responder: Responder) -> None:
        responder.send(b"before")
        raise error

    return handler


# ---- streams ----------------------------------------------------------------------------------


async def test_many_streams_share_a_connection_and_keep_their_order(
    server: RequestServer, client: RequestClient
) -> None:
    async def read(n: int) -> list[bytes]:
        stream = await client.open(server.address, "count", b"%d" % n, RequestContext())
        return [item async for item in stream]

    sizes = [0, 1, 100, 1000] * 10
    results = await asyncio.gather(*map(read, sizes))
    assert results == [[b"%d" % i for i in range(n)] for n in sizes]
    assert len(server.connections) == 1


async def test_ready_gives_what_has_arrived(server: RequestServer, client: RequestClient) -> None:
    stream = await client.open(server.address, "count", b"50", RequestContext())
    assert stream.ready() == []
    items = []
    async for item in stream:
        items += [item, *stream.ready()]
    assert items == [b"%d" % i for i in range(50)]


async def test_a_stream_has_one_reader_and_the_next_one_may_follow_a_cancelled_one(
    server: RequestServer, client: RequestClient
) -> None:
    may_send = asyncio.Event()

    async def later(payload: bytes, context: RequestContext, responder: Responder) -> None:
        await may_send.wait()
        responder.send(b"one")

    server.register("later", later)
    stream = await client.open(server.address, "later", b"", RequestContext())
    first = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    with pytest.raises(InternalError, match="two readers"):
        await stream.take()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    may_send.set()
    assert await stream.take() == [b"one"]
    with pytest.raises(StopAsyncIteration):
        await stream.__anext__()


@pytest.mark.parametrize("num_items", [1, WINDOW_ITEMS, WINDOW_ITEMS + 1])
async def test_a_stream_that_its_handler_ends_is_over_with_its_last_item(
    server: RequestServer, client: RequestClient, num_items: int
) -> None:
    may_return = asyncio.Event()

    async def ends(payload: bytes, context: RequestContext, responder: Responder) -> None:
        for i in range(num_items):
            responder.send(b"%d" % i)
        responder.end()
        if num_items <= WINDOW_ITEMS:  # else the rest waits for the reader, and the end for that
            await may_return.wait()
            raise ServiceError("too late for the caller")

    server.register("ends", ends)
    stream = await client.open(server.address, "ends", b"", RequestContext())
    if num_items == 1:
        assert await stream.take() == [b"0"]
        assert stream.is_done
    else:
        assert [item async for item in stream] == [b"%d" % i for i in range(num_items)]
    may_return.set()
    await eventually(lambda: not server.running)
    assert await client.call(server.address, "echo", b"hi", RequestContext()) == b"hi"


async def test_a_payload_of_megabytes_arrives_whole(
    server: RequestServer, client: RequestClient
) -> None:
    payload = bytes(range(256)) * 40_000
    assert await client.call(server.address, "echo", payload, RequestContext()) == payload


async def test_a_call_refuses_more_or_less_than_one_item(
    server: RequestServer, client: RequestClient
) -> None:
    for n in (b"0", b"2"):
        with pytest.raises(ProtocolError, match=f"answered {int(n)} items"):
            await client.call(server.address, "count", n, RequestContext())


async def test_headers_id_and_deadline_travel(server: RequestServer, client: RequestClient) -> None:
    seen: list[RequestContext] = []

    async def look(payload: bytes, context: RequestContext, responder: Responder) -> None:
        seen.append(context)
        responder.send(b"%d" % (0 < context.remaining_s() <= 60))

    server.register("look", look)
    context = RequestContext("r-1", timeout_s=60, headers={"traceparent": "00-1"})
    assert await client.call(server.address, "look", b"", context) == b"1"
    assert (seen[0].id, seen[0].headers) == ("r-1", {"traceparent": "00-1"})


# ---- errors -----------------------------------------------------------------------------------


async def test_a_typed_error_arrives_as_itself_after_the_items(
    server: RequestServer, client: RequestClient
) -> None:
    server.register("fail", fail_with(ContextLengthError("4097 > 4096", param="messages")))
    stream = await client.open(server.address, "fail", b"", RequestContext())
    assert await anext(stream) == b"before"
    with pytest.raises(ContextLengthError, match="4097 > 4096") as caught:
        await anext(stream)
    assert caught.value.param == "messages"


async def test_an_overload_keeps_its_retry_after(
    server: RequestServer, client: RequestClient
) -> None:
    server.register("fail", fail_with(OverloadedError("full", retry_after_s=7.5)))
    with pytest.raises(OverloadedError) as caught:
        await client.call(server.address, "fail", b"", RequestContext())
    assert caught.value.retry_after_s == 7.5


async def test_a_bug_is_told_by_an_id_and_not_by_its_text(
    server: RequestServer, client: RequestClient, caplog: pytest.LogCaptureFixture
) -> None:
    server.register("fail", fail_with(ValueError("a secret")))
    with pytest.raises(InternalError, match=r"^internal error [0-9a-f]{16}$") as caught:
        await client.call(server.address, "fail", b"", RequestContext())
    assert "a secret" in caplog.text
    assert caught.value.message.split()[-1] in caplog.text


async def test_an_unknown_endpoint_is_not_found(
    server: RequestServer, client: RequestClient
) -> None:
    with pytest.raises(UnavailableError, match="'nope'"):
        await client.call(server.address, "nope", b"", RequestContext())
    with pytest.raises(UnavailableError) as caught:
        await client.call(server.address, "n" * MAX_TEXT, b"", RequestContext())
    assert len(caught.value.message) < 128


async def test_nobody_listening_is_an_error_that_names_the_address(client: RequestClient) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionLostError, match=address):
        await client.call(address, "echo", b"", RequestContext())


@pytest.mark.parametrize("key", ["port", "port_range"])
async def test_a_taken_port_is_an_error_that_names_its_key(server: RequestServer, key: str) -> None:
    port = int(server.address.rpartition(":")[2])
    taken = RuntimeConfig.model_validate({key: port if key == "port" else f"{port}-{port}"})
    with pytest.raises(ServiceError, match=rf"^runtime.{key}: .*127.0.0.1.*{port}"):
        await RequestServer(taken, "second").start()


async def test_processes_take_the_ports_of_their_range_one_by_one() -> None:
    first = free_port()
    config = RuntimeConfig(port_range=f"{first}-{first + 40}")
    async with serving(config) as one, serving(config) as other:
        ports = [int(each.address.rpartition(":")[2]) for each in (one, other)]
    assert first <= ports[0] < ports[1] <= first + 40


async def test_an_ipv6_literal_is_listened_on_and_dialed() -> None:
    handlers = {"fail": fail_with(NotFoundError("it was reached"))}
    async with serving(RuntimeConfig(host="::1"), handlers) as server, calling(CONFIG) as client:
        assert server.address.startswith("[::1]:")
        with pytest.raises(NotFoundError, match="it was reached"):
            await client.call(server.address, "fail", b"", RequestContext())


# ---- cancellation and deadlines ---------------------------------------------------------------


@pytest.mark.parametrize("way", ["stream", "context", "async with"])
async def test_cancelling_reaches_the_handler(
    server: RequestServer, client: RequestClient, way: str
) -> None:
    context = RequestContext()
    stream = await client.open(server.address, "until_cancelled", b"", context)
    assert await anext(stream) == b"started"
    assert len(server.running) == 1
    if way == "stream":
        stream.cancel()
    elif way == "context":
        context.cancel("the client went away")
    else:
        async with stream:
            pass
    with pytest.raises(CancelledRequestError):
        await anext(stream)
    await eventually(lambda: not server.running)
    assert await client.call(server.address, "echo", b"still", RequestContext()) == b"still"


async def test_a_deadline_ends_a_stream_on_both_sides(
    server: RequestServer, client: RequestClient
) -> None:
    context = RequestContext(timeout_s=0.5)
    stream = await client.open(server.address, "until_cancelled", b"", context)
    assert await anext(stream) == b"started"
    with pytest.raises(DeadlineError):
        await anext(stream)
    await eventually(lambda: not server.running)


async def test_a_request_that_is_over_is_not_sent(
    server: RequestServer, client: RequestClient
) -> None:
    context = RequestContext()
    context.cancel("too late")
    with pytest.raises(CancelledRequestError):
        await client.open(server.address, "echo", b"", context)


# ---- flow control -----------------------------------------------------------------------------


async def test_a_reader_that_does_not_read_stops_the_writer(
    server: RequestServer, client: RequestClient
) -> None:
    num_sent = 0

    async def flood(payload: bytes, context: RequestContext, responder: Responder) -> None:
        nonlocal num_sent
        while True:
            await responder.drain()
            responder.send(b"x")
            num_sent += 1

    server.register("flood", flood)
    stream = await client.open(server.address, "flood", b"", RequestContext())
    await eventually(lambda: num_sent == WINDOW_ITEMS)
    assert await client.call(server.address, "echo", b"others", RequestContext()) == b"others"
    assert num_sent == WINDOW_ITEMS
    num_read = 0
    while num_read < 2 * WINDOW_ITEMS:
        await anext(stream)
        num_read += 1
    await eventually(lambda: num_sent > 2 * WINDOW_ITEMS)
    stream.cancel()
    await eventually(lambda: not server.running)


# ---- drain, stop, reconnect -------------------------------------------------------------------


async def test_a_stopping_server_ends_its_streams_at_once(
    server: RequestServer, client: RequestClient
) -> None:
    stream = await client.open(server.address, "until_cancelled", b"", RequestContext())
    await anext(stream)
    await server.stop()
    with pytest.raises((UnavailableError, ConnectionLostError)):
        await anext(stream)


async def test_a_client_dials_again_after_a_restart(client: RequestClient) -> None:
    config = CONFIG.model_copy(update={"port": free_port()})
    first, again = RequestServer(config, "first"), RequestServer(config, "again")
    first.register("fail", fail_with(NotFoundError("it is the first one")))
    again.register("fail", fail_with(NotFoundError("it is the new one")))
    await first.start()
    with pytest.raises(NotFoundError, match="it is the first one"):
        await client.call(first.address, "fail", b"", RequestContext())
    await first.stop()
    await again.start()
    with pytest.raises(NotFoundError, match="it is the new one"):
        await client.call(again.address, "fail", b"", RequestContext())
    await again.stop()


async def test_a_lost_client_cancels_its_handlers(server: RequestServer) -> None:
    async with calling(CONFIG) as client:
        stream = await client.open(server.address, "until_cancelled", b"", RequestContext())
        await anext(stream)
    with pytest.raises(ConnectionLostError):
        await anext(stream)
    await eventually(lambda: not server.running and not server.connections)


async def test_an_endpoint_that_was_taken_back_refuses_while_the_others_go_on(
    server: RequestServer, client: RequestClient
) -> None:
    server.unregister("echo")
    with pytest.raises(UnavailableError, match="no endpoint 'echo'"):
        await client.call(server.address, "echo", b"x", RequestContext())
    assert await client.call(server.address, "count", b"1", RequestContext()) == b"0"


async def test_a_stop_reaches_the_handler_and_the_stream_goes_on(
    server: RequestServer, client: RequestClient
) -> None:
    async def until_stopped(payload: bytes, context: RequestContext, answer: Responder) -> None:
        stopped = asyncio.Event()
        context.on_stop(stopped.set)
        answer.send(b"begun")
        await stopped.wait()
        answer.send(b"cancelled" if context.is_cancelled else b"stopped")

    server.register("until_stopped", until_stopped)
    context = RequestContext()
    stream = await client.open(server.address, "until_stopped", b"", context)
    assert await anext(stream) == b"begun"
    context.stop()
    assert [item async for item in stream] == [b"stopped"]
