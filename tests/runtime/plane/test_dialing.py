"""Connections that are dialed, lost and dialed again, and who learns of it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import (
    CancelledRequestError,
    ConnectionLostError,
    DeadlineError,
    TandemError,
)
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.plane.server import RequestServer
from tests.runtime.plane.ends import calling, serving
from tests.services import eventually, free_port


@pytest.fixture
async def silent() -> AsyncIterator[str]:
    """The address of a listener that never answers, as a stopped process is one."""
    stay = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await stay.wait()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        host, port = listener.sockets[0].getsockname()
        yield f"{host}:{port}"
        stay.set()


async def test_a_dial_takes_no_longer_than_the_requests_own_time(silent: str) -> None:
    config = RuntimeConfig(connect_timeout_s=600)
    async with calling(config) as client, RequestContext(timeout_s=0.1) as context:
        with pytest.raises(DeadlineError):
            await client.call(silent, "status", b"", context)


async def test_a_canceled_request_leaves_the_dial_to_the_others(silent: str) -> None:
    context, patient = RequestContext(), RequestContext()
    async with calling(RuntimeConfig(connect_timeout_s=1.0)) as client:
        one, other = (
            asyncio.create_task(client.call(silent, "status", b"", each))
            for each in (context, patient)
        )
        await asyncio.wait((one, other), timeout=0.1)
        context.cancel("the caller left")
        with pytest.raises(CancelledRequestError, match="the caller left"):
            await one
        assert not other.done()
        with pytest.raises(ConnectionLostError, match="no answer in time"):
            await other


async def test_a_loss_is_told_before_the_streams_fail(
    server: RequestServer, client: RequestClient
) -> None:
    events: list[str] = []

    async def read() -> None:
        stream = await client.open(server.address, "until_cancelled", b"", RequestContext())
        try:
            events.append((await anext(stream)).decode())
            await anext(stream)
        except TandemError:
            events.append("failed")

    end = client.on_loss(events.append)
    reading = asyncio.create_task(read())
    await eventually(lambda: events == ["started"])
    for connection in list(server.connections):
        connection.abort(ConnectionLostError("as if killed"))
    await reading
    assert events == ["started", server.address, "failed"]
    end()


async def test_a_dial_that_fails_is_told_as_a_loss_and_the_own_close_is_not(
    server: RequestServer,
) -> None:
    losses: list[str] = []
    nobody = f"127.0.0.1:{free_port()}"
    async with calling(RuntimeConfig()) as client:
        client.on_loss(losses.append)
        with pytest.raises(ConnectionLostError):
            await client.reach(nobody, RequestContext())
        await client.reach(server.address, RequestContext())
    assert losses == [nobody]


async def test_a_peer_is_quiet_some_time_before_it_is_given_up() -> None:
    config = RuntimeConfig(heartbeat_interval_s=0.1, heartbeat_misses=5)
    losses: list[str] = []
    async with serving(config) as server, calling(config) as client:
        client.on_loss(losses.append)
        assert not client.is_quiet(server.address)
        await client.reach(server.address, RequestContext())
        assert not client.is_quiet(server.address)
        (connection,) = server.connections
        assert connection._timer is not None
        connection._timer.cancel()  # no more heartbeats
        await eventually(lambda: client.is_quiet(server.address))
        assert not losses
        await eventually(lambda: losses == [server.address])
        assert not client.is_quiet(server.address)
