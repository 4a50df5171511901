"""Who may talk on the request plane, and what a peer that breaks its rules gets."""

import asyncio

import pytest

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ConnectionLostError, ProtocolError, UnavailableError
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.plane.framing import (
    PREAMBLE_BYTES,
    VERSION,
    Batch,
    FrameReader,
    Hello,
    Open,
    Preamble,
    Status,
    encode_frame,
    encode_preamble,
    token_digest,
)
from tandem.runtime.plane.server import RequestServer, Responder
from tests.runtime.plane.raw_peer import RawPeer
from tests.services import eventually

# ---- who may talk -----------------------------------------------------------------------------


@pytest.mark.parametrize("ours", [None, "wrong"])
async def test_without_the_cluster_token_nothing_is_served(ours: str | None) -> None:
    server = RequestServer(RuntimeConfig.model_validate({"cluster_token": "right"}), "server")
    await server.start()
    client = RequestClient(RuntimeConfig.model_validate({"cluster_token": ours}), "client")
    with pytest.raises(ProtocolError, match="refused the cluster token"):
        await client.call(server.address, "echo", b"", RequestContext())
    await client.close()
    await server.stop()


async def test_with_the_cluster_token_all_is_served() -> None:
    config = RuntimeConfig.model_validate({"cluster_token": "right"})
    server = RequestServer(config, "server")
    await server.start()
    client = RequestClient(config, "client")
    with pytest.raises(UnavailableError):
        await client.call(server.address, "echo", b"", RequestContext())
    await client.close()
    await server.stop()


@pytest.mark.parametrize("digest", [bytes(32), token_digest("right", "client")])
async def test_a_server_that_does_not_know_the_token_is_not_trusted(digest: bytes) -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_preamble(Preamble(VERSION, Status.OK, digest)))
        await reader.read()
        writer.close()

    async with await asyncio.start_server(impostor, "127.0.0.1", 0) as fake:
        host, port = fake.sockets[0].getsockname()
        client = RequestClient(RuntimeConfig.model_validate({"cluster_token": "right"}), "client")
        with pytest.raises(ProtocolError, match="does not have the cluster token"):
            await client.call(f"{host}:{port}", "echo", b"", RequestContext())
        await client.close()


# ---- a raw peer -------------------------------------------------------------------------------


async def test_what_one_tick_sends_leaves_as_one_frame(server: RequestServer) -> None:
    responders: list[Responder] = []

    async def collect(payload: bytes, context: RequestContext, responder: Responder) -> None:
        responders.append(responder)
        await context.cancelled()

    server.register("collect", collect)
    peer = await RawPeer.dial(server.address)
    peer.writer.write(encode_frame(0, Hello("raw")))
    for i in range(3):
        peer.writer.write(encode_frame(i + 1, Open(i, "collect", b"", 9, "r", None, {})))
    await peer.reader.readexactly(PREAMBLE_BYTES)
    await eventually(lambda: len(responders) == 3)
    for responder in responders:
        responder.send(b"a")
        responder.send(b"b")
    (batch,) = await peer.read_batches(6)
    assert batch.items == [(i, item) for i in range(3) for item in (b"a", b"b")]
    await peer.close()


@pytest.mark.parametrize(
    ("preamble", "status"),
    [
        (encode_preamble(Preamble(VERSION + 1, Status.OK, bytes(32))), Status.WRONG_VERSION),
        (encode_preamble(Preamble(VERSION, Status.OK, bytes(31) + b"x")), Status.WRONG_TOKEN),
    ],
)
async def test_a_refusal_says_why_shows_no_digest_and_closes(
    server: RequestServer, preamble: bytes, status: Status
) -> None:
    peer = await RawPeer.dial(server.address, preamble)
    assert await peer.reader.read() == encode_preamble(Preamble(VERSION, status, bytes(32)))
    await peer.close()


async def test_a_foreign_protocol_is_hung_up_on_without_an_answer(server: RequestServer) -> None:
    peer = await RawPeer.dial(server.address, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert await peer.reader.read() == b""
    await peer.close()
    await eventually(lambda: not server.connections)


async def test_a_gap_in_a_clients_frames_ends_the_connection(server: RequestServer) -> None:
    peer = await RawPeer.dial(server.address)
    await peer.reader.readexactly(PREAMBLE_BYTES)
    peer.writer.write(encode_frame(0, Hello("raw")) + encode_frame(2, Hello("raw")))
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await peer.reader.readexactly(10_000)
    await eventually(lambda: not server.connections)
    peer.writer.close()


async def test_a_gap_in_a_servers_frames_loses_the_streams(client: RequestClient) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(PREAMBLE_BYTES)
        writer.write(encode_preamble(Preamble(VERSION, Status.OK, bytes(32))))
        frames = FrameReader()
        while not any(isinstance(frame, Open) for frame in frames.feed(await reader.read(9999))):
            pass
        writer.write(encode_frame(0, Batch([(1, b"first")], [], [])))
        writer.write(encode_frame(2, Batch([(1, b"third")], [], [])))
        await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as fake:
        host, port = fake.sockets[0].getsockname()
        stream = await client.open(f"{host}:{port}", "x", b"", RequestContext())
        with pytest.raises(ConnectionLostError, match="frame 2 arrived where 1 was due"):
            async for item in stream:
                assert item == b"first"
        await client.close()
