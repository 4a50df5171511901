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
    decode_preamble,
    encode_frame,
    encode_preamble,
)
from tandem.runtime.plane.server import RequestServer, Responder
from tests.runtime.plane.eavesdropper import Eavesdropper
from tests.runtime.plane.ends import calling, serving
from tests.runtime.plane.raw_peer import GREETING, RawPeer
from tests.services import eventually

WITH_TOKEN = RuntimeConfig.model_validate({"cluster_token": "right"})

# ---- who may talk -----------------------------------------------------------------------------


@pytest.mark.parametrize("ours", [None, "wrong"])
async def test_without_the_cluster_token_nothing_is_served(ours: str | None) -> None:
    wrong = RuntimeConfig.model_validate({"cluster_token": ours})
    async with serving(WITH_TOKEN) as server, calling(wrong) as client:
        with pytest.raises(ProtocolError, match="refused the cluster token"):
            await client.call(server.address, "echo", b"", RequestContext())


async def test_with_the_cluster_token_all_is_served() -> None:
    async with serving(WITH_TOKEN) as server, calling(WITH_TOKEN) as client:
        with pytest.raises(UnavailableError):
            await client.call(server.address, "echo", b"", RequestContext())


@pytest.mark.parametrize("echoes", [False, True])
async def test_a_server_that_does_not_know_the_token_is_not_trusted(echoes: bool) -> None:
    """It shows nothing, or the client's own nonce and proof."""

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for zeros in (GREETING[:PREAMBLE_BYTES], GREETING[PREAMBLE_BYTES:]):
            theirs = await reader.readexactly(PREAMBLE_BYTES)
            writer.write(theirs if echoes else zeros)
        await reader.read()
        writer.close()

    async with (
        await asyncio.start_server(impostor, "127.0.0.1", 0) as fake,
        calling(WITH_TOKEN) as client,
    ):
        host, port = fake.sockets[0].getsockname()
        with pytest.raises(ProtocolError, match="does not have the cluster token"):
            await client.call(f"{host}:{port}", "echo", b"", RequestContext())


async def test_the_greeting_of_another_connection_opens_none() -> None:
    """Recorded, with another address in front of the server: neither replay nor relay works."""
    async with serving(WITH_TOKEN) as server:
        between = Eavesdropper(server.address)
        async with (
            await asyncio.start_server(between, "127.0.0.1", 0) as fake,
            calling(WITH_TOKEN) as client,
        ):
            host, port = fake.sockets[0].getsockname()
            with pytest.raises(ProtocolError, match="refused the cluster token"):
                await client.call(f"{host}:{port}", "echo", b"", RequestContext())
            server.address = f"{host}:{port}"  # as if it advertised the other one: a fair proxy
            with pytest.raises(UnavailableError):
                await client.call(server.address, "echo", b"", RequestContext())
        recorded = bytes(between.from_client[2 * PREAMBLE_BYTES :][: 2 * PREAMBLE_BYTES])
        peer = await RawPeer.dial(between.target, recorded)
        await peer.reader.readexactly(PREAMBLE_BYTES)
        assert decode_preamble(await peer.reader.read()).status is Status.WRONG_TOKEN
        await peer.close()


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
    await peer.reader.readexactly(len(GREETING))
    await eventually(lambda: len(responders) == 3)
    for responder in responders:
        responder.send(b"a")
        responder.send(b"b")
    (batch,) = await peer.read_batches(6)
    assert batch.items == [(i, item) for i in range(3) for item in (b"a", b"b")]
    await peer.close()


async def test_a_refusal_says_why_shows_no_proof_and_closes() -> None:
    other_version = encode_preamble(Preamble(VERSION + 1, Status.OK, bytes(32)))
    async with serving(WITH_TOKEN) as server:
        peer = await RawPeer.dial(server.address, other_version)
        assert decode_preamble(await peer.reader.read()).status is Status.WRONG_VERSION
        await peer.close()
        peer = await RawPeer.dial(server.address)
        await peer.reader.readexactly(PREAMBLE_BYTES)
        refusal = decode_preamble(await peer.reader.read())
        assert refusal == Preamble(VERSION, Status.WRONG_TOKEN, bytes(32))
        await peer.close()


async def test_a_foreign_protocol_is_hung_up_on_without_an_answer(server: RequestServer) -> None:
    peer = await RawPeer.dial(server.address, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert await peer.reader.read() == b""
    await peer.close()
    await eventually(lambda: not server.connections)


async def test_a_gap_in_a_clients_frames_ends_the_connection(server: RequestServer) -> None:
    peer = await RawPeer.dial(server.address)
    await peer.reader.readexactly(len(GREETING))
    peer.writer.write(encode_frame(0, Hello("raw")) + encode_frame(2, Hello("raw")))
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await peer.reader.readexactly(10_000)
    await eventually(lambda: not server.connections)
    peer.writer.close()


async def test_a_gap_in_a_servers_frames_loses_the_streams(client: RequestClient) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        await reader.readexactly(len(GREETING))
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
