"""The wire format, on literal bytes."""

import pytest

from tandem.runtime.errors import ProtocolError
from tandem.runtime.plane.framing import (
    MAX_FRAME_BYTES,
    PREAMBLE_BYTES,
    Batch,
    Cancel,
    Credit,
    Failure,
    Frame,
    FrameReader,
    Heartbeat,
    Hello,
    Open,
    Preamble,
    Status,
    Stop,
    decode_preamble,
    encode_frame,
    encode_preamble,
    token_proof,
)

FRAMES: list[Frame] = [
    Hello("ab"),
    Open(1, "generate", b"payload", 256, "r1", 1500, {"traceparent": "00"}),
    Batch([(1, b"x"), (2, b"y")], [1], [Failure(2, "overloaded", "full", None, 2.5)]),
    Cancel(7, "bye"),
    Credit(7, 128),
    Heartbeat(41, True),
    Stop(7),
]


def test_a_frame_is_length_and_number_and_msgpack() -> None:
    assert encode_frame(3, Hello("ab", 9)) == b"\x06\0\0\0\x03\0\0\0" + b"\x93\x00\xa2ab\x09"
    assert encode_frame(1, Credit(7, 5)) == b"\x04\0\0\0\x01\0\0\0" + b"\x93\x04\x07\x05"


def test_a_preamble_is_magic_version_status_and_value() -> None:
    data = encode_preamble(Preamble(1, Status.WRONG_TOKEN, bytes(32)))
    assert data == b"TANDEM\r\n\x01\x00\x02\x00" + bytes(32)
    assert len(data) == PREAMBLE_BYTES
    assert decode_preamble(data) == Preamble(1, Status.WRONG_TOKEN, bytes(32))


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n", b"TANDEM\r\n\x01\x00\x09\x00"])
def test_a_foreign_preamble_is_refused(first: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a Tandem"):
        decode_preamble(first.ljust(PREAMBLE_BYTES, b"\0"))


def test_a_proof_is_of_one_token_side_address_and_pair_of_nonces() -> None:
    client, server = b"c" * 32, b"s" * 32
    proofs = [
        token_proof("secret", "client", client, server, "host:1"),
        token_proof("other", "client", client, server, "host:1"),
        token_proof("secret", "server", client, server, "host:1"),
        token_proof("secret", "client", server, client, "host:1"),
        token_proof("secret", "client", client, client, "host:1"),
        token_proof("secret", "client", client, server, "host:2"),
    ]
    assert len(set(proofs)) == len(proofs)
    assert {len(proof) for proof in proofs} == {32}
    assert token_proof(None, "client", client, server, "host:1") == bytes(32)


@pytest.mark.parametrize("cut_bytes", [1, 2, 7, 8, 9, 1000])
def test_frames_survive_any_way_of_cutting_the_stream(cut_bytes: int) -> None:
    data = b"".join(bytes(encode_frame(i, frame)) for i, frame in enumerate(FRAMES))
    reader = FrameReader()
    got: list[Frame] = []
    for start in range(0, len(data), cut_bytes):
        got += reader.feed(data[start : start + cut_bytes])
    assert got == FRAMES


def test_a_repeated_frame_is_an_error() -> None:
    reader = FrameReader()
    reader.feed(bytes(encode_frame(0, Hello("a"))))
    with pytest.raises(ProtocolError, match="frame 0 arrived where 1 was due"):
        reader.feed(bytes(encode_frame(0, Hello("a"))))


def test_an_oversized_frame_is_refused_from_its_header_alone() -> None:
    with pytest.raises(ProtocolError, match=f"{MAX_FRAME_BYTES + 1} bytes"):
        FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little") + bytes(4))


NESTED = b"\x94\x00\xa1a\x09" + b"\x91" * 100_000 + b"\x01"


@pytest.mark.parametrize("body", [b"\xc1", b"\x91\x63", b"\x92\x00\x07", b"\x80", b"", NESTED])
def test_a_malformed_body_is_an_error(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        FrameReader().feed(len(body).to_bytes(4, "little") + bytes(4) + body)


def test_numbers_wrap_after_four_billion_frames() -> None:
    assert encode_frame(2**32, Hello("ab"))[4:8] == bytes(4)
