"""The request plane's wire format: pure functions, values in, bytes out.

A connection opens with two fixed preambles each way, then carries frames. The value of the first is
a random nonce, that of the second a proof of the cluster token over both nonces; the client's comes
first.

    preamble   magic[8]  version u16  status u16  value[32]               little-endian
    frame      body length u32  sequence number u32  body (msgpack)       little-endian

Frames of one direction are numbered from 0 without a gap.
"""

import hmac
import struct
from enum import IntEnum

import msgspec

from tandem.runtime.errors import ProtocolError
from tandem.runtime.wire.bounds import (
    U64,
    Count,
    Many,
    Message,
    Name,
    Payload,
    Positive,
    Seconds,
    Table,
    Text,
)
from tandem.runtime.wire.decoding import Decode, decoder

MAGIC = b"TANDEM\r\n"
VERSION = 3
MAX_FRAME_BYTES = 64 * 1024 * 1024  # model files; a server may take less from its clients
FIELDS_BYTES = 64 * 1024  # room in a frame for the fields beside a payload
MAX_PAYLOAD_BYTES = MAX_FRAME_BYTES - FIELDS_BYTES
HEADER = struct.Struct("<II")
VALUE_BYTES = 32
_PREAMBLE = struct.Struct(f"<8sHH{VALUE_BYTES}s")
PREAMBLE_BYTES = _PREAMBLE.size


class Status(IntEnum):
    """The server's answer in its preamble; a client always sends OK."""

    OK = 0
    WRONG_VERSION = 1
    WRONG_TOKEN = 2


class Preamble(msgspec.Struct, frozen=True):
    """One of the two that open a connection, in each direction."""

    version: int
    status: Status
    value: bytes  # 32 bytes: a nonce, then a proof


class Hello(Message, frozen=True, array_like=True, tag=0):
    """The first frame each way: the sender's id, and the largest frame that the sender takes."""

    instance_id: Name
    max_frame_bytes: Positive = MAX_FRAME_BYTES


class Open(Message, frozen=True, array_like=True, tag=1):
    """Client to server: start a stream. `deadline_ms` is the time left; None is no deadline."""

    stream_id: Count
    endpoint: Text
    payload: Payload
    credit: Count  # items the server may send before it gets a Credit
    request_id: Text
    deadline_ms: Count | None
    headers: Table[Text]


class Batch(Message, frozen=True, array_like=True, tag=2):
    """Server to client: the output of one loop tick, for all streams of the connection.

    For each stream its items come before its end or failure.
    """

    items: Many[tuple[Count, Payload]]  # (stream id, payload)
    ends: Many[Count]  # stream ids
    fails: Many["Failure"]


class Failure(Message, frozen=True, array_like=True, tag=False):
    """The error of a stream; `code` names its class."""

    stream_id: Count
    code: Name
    message: Text
    param: Name | None
    retry_after_s: Seconds


class Cancel(Message, frozen=True, array_like=True, tag=3):
    """Client to server: end this stream now."""

    stream_id: Count
    reason: Text


class Credit(Message, frozen=True, array_like=True, tag=4):
    """Client to server: `num_items` more items of this stream were consumed."""

    stream_id: Count
    num_items: Count


class Heartbeat(Message, frozen=True, array_like=True, tag=5):
    """Both ways: a sign of life; `progress` counts engine steps and must grow while `busy`."""

    progress: U64
    busy: bool


class Stop(Message, frozen=True, array_like=True, tag=6):
    """Client to server: bring this stream to a good end soon."""

    stream_id: Count


Frame = Hello | Open | Batch | Cancel | Credit | Heartbeat | Stop

_ENCODER = msgspec.msgpack.Encoder()
_decode: Decode[Frame] = decoder(Frame)


def token_proof(
    token: str | None, side: str, client_nonce: bytes, server_nonce: bytes, address: str
) -> bytes:
    """Return a side's ("client" or "server") proof of the token; zeros without a token.

    It is of use for one connection, to the server at `address`, and in one direction: a process in
    between can neither show it again nor pass it on to another server.
    """
    if token is None:
        return bytes(VALUE_BYTES)
    said = b"\0".join((b"tandem request plane", side.encode(), address.encode(), b""))
    return hmac.digest(token.encode(), said + client_nonce + server_nonce, "sha256")


def encode_preamble(preamble: Preamble) -> bytes:
    """Return the `PREAMBLE_BYTES` bytes of one preamble."""
    return _PREAMBLE.pack(MAGIC, preamble.version, preamble.status, preamble.value)


def decode_preamble(data: bytes) -> Preamble:
    """Invert `encode_preamble`. Raise ProtocolError on another protocol's bytes."""
    magic, version, status, value = _PREAMBLE.unpack(data)
    if magic != MAGIC or status not in tuple(Status):
        raise ProtocolError("not a Tandem request plane")
    return Preamble(version, Status(status), value)


def encode_frame(sequence_number: int, frame: Frame) -> bytearray:
    """Return one frame with its header. Raise ProtocolError when it exceeds the limit."""
    buffer = bytearray(HEADER.size)
    _ENCODER.encode_into(frame, buffer, HEADER.size)
    num_bytes = len(buffer) - HEADER.size
    if num_bytes > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {num_bytes} bytes exceeds the limit {MAX_FRAME_BYTES}")
    HEADER.pack_into(buffer, 0, num_bytes, sequence_number & 0xFFFFFFFF)
    return buffer


class FrameReader:
    """Cuts a byte stream into frames, checking size and sequence number from the header alone."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self.unfinished = bytearray()  # a frame whose end has not arrived
        self._next_sequence_number = 0

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that `data` completes. Raise ProtocolError on a malformed one."""
        source: bytes | bytearray = data
        if self.unfinished:
            self.unfinished += data
            source = self.unfinished
        frames: list[Frame] = []
        offset = 0
        end = len(source)
        with memoryview(source) as view:
            while end - offset >= HEADER.size:
                body = offset + HEADER.size
                num_bytes = self._check_header(*HEADER.unpack_from(view, offset))
                if end - body < num_bytes:
                    break
                offset = body + num_bytes
                self._next_sequence_number = (self._next_sequence_number + 1) & 0xFFFFFFFF
                frames.append(_decode(view[body:offset]))
        if source is self.unfinished:
            del self.unfinished[:offset]
        elif offset < end:
            self.unfinished += data[offset:]
        return frames

    def _check_header(self, num_bytes: int, sequence_number: int) -> int:
        if num_bytes > self._max_frame_bytes:
            raise ProtocolError(
                f"a frame of {num_bytes} bytes exceeds the limit {self._max_frame_bytes}"
            )
        if sequence_number != self._next_sequence_number:
            expected = self._next_sequence_number
            raise ProtocolError(f"frame {sequence_number} arrived where {expected} was due")
        return num_bytes
