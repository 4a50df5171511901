import importlib.util
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tandem.runtime.errors import ProtocolError, TransferError
from tandem.transfer.transport import BlockGrid
from tandem.transfer.ucx.port import UcxPort
from tandem.transfer.ucx.transport import UcxTransport
from tandem.transfer.ucx.wire import (
    MAX_MESSAGE_BYTES,
    Identity,
    Kind,
    Message,
    decode_identity,
    decode_read,
    decode_write,
    encode_identity,
    seal,
    unseal,
)
from tests.transfer.ucx.sides import WHOLE, Peer, Side, finish, peers, rounds, until

pytestmark = [pytest.mark.ucx, pytest.mark.slow]

if importlib.util.find_spec("ucxx") is None:
    pytest.skip("ucxx is not installed (the extra 'ucx')", allow_module_level=True)


@pytest.fixture
def spawn() -> Iterator[Callable[..., Peer]]:
    with peers() as spawn_peer:
        yield spawn_peer


def test_garbage_is_dropped_and_does_no_harm(pair: tuple[Side, Side]) -> None:
    p, d = pair
    tables = p.add(d)
    identity = decode_identity(d.transport.metadata())
    stranger = UcxPort()
    endpoint = stranger.connect(identity.address)
    generator = random.Random(1)
    for size in (0, 1, 15, 16, 17, 40, 600, 9000, 100_000, MAX_MESSAGE_BYTES + 1):
        stranger.send_message(endpoint, generator.randbytes(size))
    payload = np.ones(200_000, np.uint8)
    strays = [
        stranger.send_payload(endpoint, stranger.pool(_grid_of(payload)).view(0, size), tag)
        for tag, size in ((0, 100), (5, 200_000), (7, 9000))
    ]
    for kind in Kind:
        for body in (b"", b"\xff" * 4, b"\xff" * 400, generator.randbytes(64)):
            for session in (0, generator.getrandbits(64)):
                stranger.send_message(endpoint, seal(identity.key, Message(kind, session, 1, body)))
    deadline = time.perf_counter() + 60
    while not (stranger.all_messages_sent and all(request.completed for request in strays)):
        assert time.perf_counter() < deadline
        stranger.progress()
        d.listen()
    assert not d.heard and not d.blocks.any()
    finish(p, p.transport.post("WRITE", tables, [1], [1], b"still here"), d)
    assert d.heard == [("p", b"still here")]
    stranger.close_endpoint(endpoint)
    strays.clear()
    del endpoint
    stranger.close()


def test_nonsense_in_an_open_session_is_dropped_and_the_session_goes_on(
    pair: tuple[Side, Side],
) -> None:
    p, d = pair
    tables = p.add(d)
    key = decode_identity(d.transport.metadata()).key
    session = tables.session  # type: ignore[attr-defined]
    for kind in (Kind.WRITE, Kind.READ, Kind.GO, Kind.DONE, Kind.FAIL, Kind.ABORT, Kind.HELLO):
        for body in (b"", b"\x01\0\0\0", b"\xff" * 12, secrets.token_bytes(100)):
            message = Message(kind, session.session_id, secrets.randbits(64), body)
            p.transport._port.send_message(session.endpoint, seal(key, message))
    rounds(p, d)
    assert not d.blocks.any() and not d.heard
    finish(p, p.transport.post("WRITE", tables, [1], [1], b"fine"), d)


def test_messages_are_read_back_and_anything_else_is_refused() -> None:
    key = bytes(range(16))
    message = Message(Kind.GO, 0x0102030405060708, 9, b"\x2a" + bytes(7))
    sealed = seal(key, message)
    assert sealed[16:] == (
        b"TUX1\x06\0\0\0" + b"\x08\x07\x06\x05\x04\x03\x02\x01" + b"\x09" + bytes(7) + message.body
    )
    assert unseal(key, sealed) == message
    for bad in (sealed[:-1], sealed + b"\0", b"", sealed[:20], b"x" + sealed[1:]):
        with pytest.raises(ProtocolError):
            unseal(key, bad)
    with pytest.raises(ProtocolError):
        unseal(bytes(16), sealed)
    generator = random.Random(3)
    for size in list(range(40)) * 5:
        for decode in (decode_write, decode_read, decode_identity):
            with pytest.raises(ProtocolError):
                decode(b"\xff\xff\xff\xff" * 3 + generator.randbytes(size))
    identity = Identity("d.e1", key, b"address", 4096)
    assert decode_identity(encode_identity(identity)) == identity
    with pytest.raises(ProtocolError):
        decode_identity(encode_identity(identity)[:-1])


def _grid_of(array: np.ndarray[Any, Any]) -> BlockGrid:
    return BlockGrid(array.ctypes.data, array.nbytes, 1, "DRAM", 0)


def test_a_peer_that_stops_continues_and_dies_is_seen_for_what_it_is(
    make: Callable[..., Side], spawn: Callable[..., Peer]
) -> None:
    num_blocks = 4096
    p, peer = make("p", num_blocks), spawn("d", num_blocks)
    everything = list(range(num_blocks))
    name = p.transport.add_peer(peer.metadata, peer.grid)
    tables = p.transport.prepare(name, WHOLE, WHOLE)
    finish(p, p.transport.post("WRITE", tables, everything, everything[::-1], b"one"))
    assert bytes.fromhex(peer.line()) == b"one"

    peer.signal(signal.SIGSTOP)
    handle = p.transport.post("WRITE", tables, everything, everything, b"two")
    rounds(p, count=2000)
    assert not p.transport.poll(handle)
    peer.signal(signal.SIGCONT)
    finish(p, handle)
    assert bytes.fromhex(peer.line()) == b"two"
    sent = p.blocks.copy()
    p.blocks[:] = 0
    finish(p, p.transport.post("READ", tables, everything, everything, b""))
    assert np.array_equal(p.blocks, sent)

    peer.signal(signal.SIGSTOP)
    handle = p.transport.post("WRITE", tables, everything, everything, b"three")
    assert not p.transport.poll(handle)
    began = time.perf_counter()
    peer.kill()
    with pytest.raises(TransferError, match="lost"):
        finish(p, handle)
    assert time.perf_counter() - began < 10
    with pytest.raises(TransferError):
        p.transport.post("WRITE", tables, [0], [0], b"to the dead")
    p.transport.remove_peer("d")

    reborn = spawn("d", num_blocks)
    assert reborn.metadata != peer.metadata
    with pytest.raises(TransferError):
        p.transport.notify("d", b"not yet")
    tables = p.transport.prepare(p.transport.add_peer(reborn.metadata, reborn.grid), WHOLE, WHOLE)
    finish(p, p.transport.post("WRITE", tables, [7], [5], b"new"))
    assert bytes.fromhex(reborn.line()) == b"new"


def test_a_stopped_peer_can_be_removed_at_once_and_delays_nobody_else(
    make: Callable[..., Side], spawn: Callable[..., Peer]
) -> None:
    num_blocks = 4096
    p, peer = make("p", num_blocks), spawn("d", num_blocks)
    d = make("d2", num_blocks, zeros=True)
    everything = list(range(num_blocks))
    stuck = p.transport.prepare(p.transport.add_peer(peer.metadata, peer.grid), WHOLE, WHOLE)
    finish(p, p.transport.post("WRITE", stuck, [0], [0], b"warm"))
    tables = p.add(d)
    handles = [p.transport.post("WRITE", stuck, everything, everything, b"") for _ in range(4)]
    until(lambda: handles[0].has_go, p)  # type: ignore[attr-defined]
    peer.signal(signal.SIGSTOP)
    finish(p, p.transport.post("WRITE", tables, everything, everything, b"by"), d)
    began = time.perf_counter()
    p.transport.remove_peer("d")
    assert time.perf_counter() - began < 10
    finish(p, p.transport.post("WRITE", tables, everything, everything, b"by"), d)
    for handle in handles:
        p.transport.release(handle)


def test_the_library_is_loaded_on_use_and_leaves_the_environment_as_it_was() -> None:
    code = """
import os, sys
from tandem.transfer.ucx.transport import UcxTransport
assert "ucxx" not in sys.modules
before = dict(os.environ)
UcxTransport("alone").close()
assert "ucxx" in sys.modules and os.environ == before
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_a_context_without_a_registration_cache_is_refused() -> None:
    """It would crash when an endpoint is closed during a send; hooks on memory make the cache."""
    code = """
from tandem.runtime.errors import TransferError
from tandem.transfer.ucx.transport import UcxTransport
try:
    UcxTransport("alone")
except TransferError as error:
    assert "registration cache" in error.message
else:
    raise AssertionError("it was opened")
"""
    environment = os.environ | {"UCX_MEM_EVENTS": "n"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ucxx._lib.libucxx", None)
    with pytest.raises(TransferError, match=r"pip install 'ucxx-cu13>="):
        UcxTransport("alone")
