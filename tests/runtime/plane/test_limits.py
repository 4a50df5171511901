"""The memory that one peer can claim of a server of the request plane."""

import asyncio
import gc
import time
import weakref
from collections.abc import Iterator

import pytest

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ProtocolError
from tandem.runtime.plane import server as server_module
from tandem.runtime.plane import server_connection
from tandem.runtime.plane.framing import Open
from tandem.runtime.plane.server import RequestServer, Responder
from tests.runtime.plane.ends import calling, echo, serving
from tests.runtime.plane.raw_peer import RawPeer
from tests.services import eventually

MIB = 1024 * 1024


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def call(stream_id: int, endpoint: str, credit: int = 9) -> Open:
    return Open(stream_id, endpoint, b"", credit, f"r{stream_id}", None, {})


async def test_answers_that_are_not_read_are_not_made(server: RequestServer) -> None:
    num_calls, num_answers = 400, 0

    async def big(payload: bytes, context: RequestContext, responder: Responder) -> None:
        nonlocal num_answers
        num_answers += 1
        responder.send(bytes(256 * 1024))

    server.register("big", big)
    peer = await RawPeer.join(server.address)
    for i in range(num_calls):
        peer.send(call(i, "big"))
    await eventually(lambda: len(server.running) > 0)
    await asyncio.sleep(0.2)
    assert num_answers < num_calls / 4
    batches = await peer.read_batches(num_calls)
    answered = [stream_id for batch in batches for stream_id, _ in batch.items]
    assert answered == list(range(num_calls))
    await peer.close()


async def test_a_connection_has_a_limit_of_streams(
    server: RequestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_connection, "MAX_STREAMS", 10)
    peer = await RawPeer.join(server.address)
    for i in range(11):
        peer.send(call(i, "until_cancelled"))
    failure = await peer.read_failure()
    assert (failure.stream_id, failure.code) == (10, "overloaded")
    assert len(server.running) == 10
    await peer.close()


async def test_a_stream_whose_items_are_not_read_is_cancelled_and_others_go_on(
    server: RequestServer,
) -> None:
    async def flood(payload: bytes, context: RequestContext, responder: Responder) -> None:
        for _ in range(server_connection.MAX_BACKLOG_BYTES // MIB + 1):
            responder.send(bytes(MIB))
        await context.cancelled()

    server.register("flood", flood)
    peer = await RawPeer.join(server.address)
    peer.send(call(1, "flood", credit=0))
    failure = await peer.read_failure()
    assert (failure.stream_id, failure.code) == (1, "cancelled")
    assert "left too much unread" in failure.message
    (connection,) = server.connections
    assert connection.num_backlog_bytes == 0
    peer.send(call(2, "until_cancelled"))
    (batch,) = await peer.read_batches(1)
    assert batch.items == [(2, b"started")]
    await peer.close()


async def test_a_peer_that_reads_nothing_is_not_read_from_and_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_connection, "MAX_UNSENT_BYTES", 64 * 1024)
    num_sent = 0
    async with serving(RuntimeConfig(heartbeat_interval_s=0.1, stall_timeout_s=0.3)) as server:
        peer = await RawPeer.join(server.address)
        peer.writer.transport.set_write_buffer_limits(high=MIB)
        (connection,) = server.connections
        while not connection.is_lost:  # each call fails, and no failure is read
            if peer.writer.transport.get_write_buffer_size() < MIB:
                for _ in range(100):
                    peer.send(call(num_sent, "nope"))
                    num_sent += 1
            await asyncio.sleep(0)
            assert connection._transport is None or (
                connection._transport.get_write_buffer_size() < 32 * MIB
            )
        assert num_sent > 1000
        peer.writer.transport.abort()


async def test_a_server_takes_frames_of_its_own_limit_and_clients_keep_to_it() -> None:
    config = RuntimeConfig()
    async with (
        serving(config, {"echo": echo}, max_frame_bytes=MIB) as server,
        calling(config) as client,
    ):
        peer = await RawPeer.join(server.address)
        peer.send_part_of_a_frame(MIB + 1)
        await eventually(lambda: not server.connections)
        peer.writer.close()
        for payload in (b"small", bytes(MIB // 2)):
            assert await client.call(server.address, "echo", payload, RequestContext()) == payload
        with pytest.raises(ProtocolError, match="payload limit"):
            await client.call(server.address, "echo", bytes(MIB), RequestContext())
        assert await client.call(server.address, "echo", b"still", RequestContext()) == b"still"


async def test_of_too_many_unfinished_bytes_the_largest_frame_goes(
    server: RequestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_UNFINISHED_BYTES", 6 * MIB)
    peers = [await RawPeer.join(server.address) for _ in range(3)]
    for peer, num_mib in zip(peers, (1, 3, 1), strict=True):
        peer.send_part_of_a_frame(num_mib * MIB)
    await eventually(lambda: server.num_unfinished_bytes > 4 * MIB)
    assert len(server.connections) == 3
    late = await RawPeer.join(server.address)
    late.send_part_of_a_frame(2 * MIB)
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await peers[1].reader.readexactly(MIB)
    assert len(server.connections) == 3
    assert server.num_unfinished_bytes < 6 * MIB
    for peer in (*peers, late):
        peer.writer.transport.abort()
    await eventually(lambda: server.num_unfinished_bytes == 0)


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("end", ["closed by the peer", "malformed"])
async def test_an_unfinished_frame_is_freed_when_its_connection_ends(
    server: RequestServer, end: str
) -> None:
    peer = await RawPeer.join(server.address)
    peer.send_part_of_a_frame(4 * MIB)
    await eventually(lambda: server.num_unfinished_bytes > 3 * MIB)
    (connection,) = server.connections
    assert connection._reader is not None
    reader = weakref.ref(connection._reader)
    if end == "malformed":
        peer.writer.write(b"\0")
    else:
        peer.writer.close()
    await eventually(lambda: not server.connections)
    assert reader() is None
    peer.writer.close()


async def test_a_peer_that_does_not_read_is_not_blamed_for_a_pause_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_connection, "MAX_UNSENT_BYTES", 64 * 1024)

    async def big(payload: bytes, context: RequestContext, responder: Responder) -> None:
        responder.send(bytes(8 * MIB))

    config = RuntimeConfig(heartbeat_interval_s=0.1, stall_timeout_s=0.5)
    async with serving(config, {"big": big}) as server:
        peer = await RawPeer.join(server.address)
        peer.send(call(1, "big"))
        (connection,) = server.connections
        await eventually(lambda: connection.liveness.is_unread)
        time.sleep(1.0)  # noqa: ASYNC251 (the server stands still, longer than is forgiven)
        (batch,) = await peer.read_batches(1)
        assert batch.items == [(1, bytes(8 * MIB))]
        assert not connection.is_lost
        await peer.close()
