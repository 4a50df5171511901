"""Items of a stream that go to a function of its reader, without a turn of the reader's task."""

import asyncio

import pytest

from tandem.runtime.context import RequestContext
from tandem.runtime.errors import (
    CancelledRequestError,
    ConnectionLostError,
    InternalError,
    ServiceError,
)
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.plane.response_stream import WINDOW_ITEMS
from tandem.runtime.plane.server import RequestServer, Responder
from tests.services import eventually


@pytest.mark.parametrize("num_items", [0, 1, 10 * WINDOW_ITEMS])
async def test_all_items_come_in_order_and_before_the_end(
    server: RequestServer, client: RequestClient, num_items: int
) -> None:
    taken: list[bytes] = []

    def take(items: list[bytes]) -> bool:
        taken.extend(items)
        return True

    stream = await client.open(server.address, "count", b"%d" % num_items, RequestContext())
    with pytest.raises(StopAsyncIteration):
        await stream.pass_on(take)
    assert taken == [b"%d" % i for i in range(num_items)]


async def test_a_reader_that_takes_no_more_gets_the_rest_later_and_holds_the_server_up(
    server: RequestServer, client: RequestClient
) -> None:
    total = 3 * WINDOW_ITEMS
    taken: list[bytes] = []

    def take(items: list[bytes]) -> bool:
        taken.extend(items)
        return False

    stream = await client.open(server.address, "count", b"%d" % total, RequestContext())
    await stream.pass_on(take)
    assert 0 < len(taken) <= WINDOW_ITEMS
    [connection] = server.connections
    await eventually(lambda: connection.num_backlog_bytes > 0)  # beyond the credit
    while len(taken) < total:
        await stream.pass_on(take)
    assert taken == [b"%d" % i for i in range(total)]


async def test_the_error_of_the_function_is_its_readers(
    server: RequestServer, client: RequestClient
) -> None:
    turns = asyncio.Queue[None]()

    async def two(_payload: bytes, _context: RequestContext, responder: Responder) -> None:
        for item in (b"one", b"two"):
            await turns.get()
            responder.send(item)
        await turns.get()

    def refuse(items: list[bytes]) -> bool:
        raise InternalError(f"no {items}")

    server.register("two", two)
    stream = await client.open(server.address, "two", b"", RequestContext())
    reading = asyncio.create_task(stream.pass_on(refuse))
    await asyncio.sleep(0)  # the items are passed on from here
    for said in ("one", "two"):
        turns.put_nowait(None)
        with pytest.raises(InternalError, match=said):
            await reading
        reading = asyncio.create_task(stream.pass_on(refuse))
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    turns.put_nowait(None)
    with pytest.raises(StopAsyncIteration):
        await stream.take()


async def test_the_errors_of_server_caller_and_connection_end_it(
    server: RequestServer, client: RequestClient
) -> None:
    async def fail(_payload: bytes, _context: RequestContext, responder: Responder) -> None:
        responder.send(b"before")
        raise ServiceError("broken")

    server.register("fail", fail)
    stream = await client.open(server.address, "fail", b"", RequestContext())
    taken: list[bytes] = []
    with pytest.raises(ServiceError, match="broken"):
        await stream.pass_on(lambda items: not taken.extend(items))
    assert taken == [b"before"]

    context = RequestContext()
    stream = await client.open(server.address, "until_cancelled", b"", context)
    reading = asyncio.create_task(stream.pass_on(lambda _items: True))
    await asyncio.sleep(0)
    context.cancel("enough")
    with pytest.raises(CancelledRequestError, match="enough"):
        await reading

    stream = await client.open(server.address, "until_cancelled", b"", RequestContext())
    taken.clear()
    reading = asyncio.create_task(stream.pass_on(lambda items: not taken.extend(items)))
    await eventually(lambda: taken)
    await server.stop()
    with pytest.raises(ConnectionLostError):
        await reading
