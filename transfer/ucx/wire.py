"""Control messages of the UCX transport: values in, bytes out. Everything is little-endian.

A message is sealed with its receiver's key, which only readers of its metadata have:

    digest 16 | magic 4 | kind u8, 3 zero bytes | session u64 | transfer id u64 | body

A session is one side's connection to a peer; it chose the number, answers repeat it. Bodies:

    HELLO   the identity, as in metadata         to the peer, before anything else
    NOTE    notice                               to the peer
    WRITE   number of pieces u32, pieces, notice to the peer, which answers GO, then DONE or FAIL
    READ    payload tag u64, number u32, pieces  to the peer, which sends the data, or answers FAIL
    ABORT   -                                    to the peer: forget this transfer
    GO      payload tag u64                      from the peer: the receives are posted
    DONE    -                                    from the peer: the data is in its memory
    FAIL    reason, UTF-8                        from the peer
    BYE     -                                    either way: forget this session

A piece is (block u32, offset in the block u32, length u32) of the receiver's pool; it may extend
into the next blocks.
"""

import hashlib
import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from tandem.runtime.errors import ProtocolError
from tandem.transfer.ucx.pieces import Pieces

MAX_MESSAGE_BYTES = 1 << 20
MAX_BODY_BYTES = MAX_MESSAGE_BYTES - 64
KEY_BYTES = 16
PAYLOAD_TAG_BITS = 63  # control messages have the bit above

_DIGEST_BYTES = 16
_MAGIC = b"TUX1"
_HEADER = struct.Struct("<4sB3xQQ")
_IDENTITY = struct.Struct("<4sHHI16s")
_TAG = struct.Struct("<Q")
_COUNT = struct.Struct("<I")
_NUMBER = np.dtype("<u4")


class Kind(IntEnum):
    HELLO = 1
    NOTE = 2
    WRITE = 3
    READ = 4
    ABORT = 5
    GO = 6
    DONE = 7
    FAIL = 8
    BYE = 9


@dataclass(frozen=True, slots=True)
class Identity:
    """The name and address of a transport, sent as its metadata."""

    name: str
    key: bytes
    address: bytes
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Message:
    kind: Kind
    session: int
    transfer_id: int
    body: bytes


def seal(key: bytes, message: Message) -> bytes:
    """Return the message, signed for the holder of `key`."""
    data = _HEADER.pack(_MAGIC, message.kind, message.session, message.transfer_id) + message.body
    return hashlib.blake2b(data, key=key, digest_size=_DIGEST_BYTES).digest() + data


def unseal(key: bytes, sealed: bytes) -> Message:
    """Return the message in `sealed`; ProtocolError unless `seal` made it with this key."""
    digest, data = sealed[:_DIGEST_BYTES], sealed[_DIGEST_BYTES:]
    ours = hashlib.blake2b(data, key=key, digest_size=_DIGEST_BYTES).digest()
    if not hmac.compare_digest(digest, ours) or len(data) < _HEADER.size:
        raise ProtocolError("a message that is not for this transport")
    magic, kind, session, transfer_id = _HEADER.unpack_from(data)
    if magic != _MAGIC or kind not in set(Kind):
        raise ProtocolError(f"a message of an unknown kind, {magic!r} {kind}")
    return Message(Kind(kind), session, transfer_id, data[_HEADER.size :])


def encode_identity(identity: Identity) -> bytes:
    name = identity.name.encode()
    head = _IDENTITY.pack(
        _MAGIC, len(name), len(identity.address), identity.block_bytes, identity.key
    )
    data = head + name + identity.address
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest() + data


def decode_identity(encoded: bytes) -> Identity:
    """Return the identity; ProtocolError if a byte is wrong, which would crash the library."""
    digest, data = encoded[:_DIGEST_BYTES], encoded[_DIGEST_BYTES:]
    if len(data) < _IDENTITY.size or (
        digest != hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
    ):
        raise ProtocolError("these are not the metadata of a UCX transport")
    magic, name_bytes, address_bytes, block_bytes, key = _IDENTITY.unpack_from(data)
    rest = data[_IDENTITY.size :]
    if magic != _MAGIC or not name_bytes or not address_bytes:
        raise ProtocolError(f"UCX metadata of an unknown version, {magic!r}")
    if len(rest) != name_bytes + address_bytes:
        raise ProtocolError("UCX metadata of a wrong length")
    try:
        name = rest[:name_bytes].decode()
    except UnicodeDecodeError as exc:
        raise ProtocolError("UCX metadata with a name that is not UTF-8") from exc
    return Identity(name, key, rest[name_bytes:], block_bytes)


def encode_tag(tag: int) -> bytes:
    return _TAG.pack(tag)


def decode_tag(body: bytes) -> int:
    if len(body) != _TAG.size:
        raise ProtocolError(f"a payload tag of {len(body)} bytes")
    tag: int = _TAG.unpack(body)[0]
    if tag >> PAYLOAD_TAG_BITS:
        raise ProtocolError(f"{tag:#x} is no payload tag")
    return tag


def encode_write(pieces: Pieces, notice: bytes) -> bytes:
    return _COUNT.pack(len(pieces)) + pieces.astype(_NUMBER).tobytes() + notice


def decode_write(body: bytes) -> tuple[Pieces, bytes]:
    return _split_pieces(body)


def encode_read(tag: int, pieces: Pieces) -> bytes:
    return encode_tag(tag) + encode_write(pieces, b"")


def decode_read(body: bytes) -> tuple[int, Pieces]:
    pieces, rest = _split_pieces(body[_TAG.size :])
    if rest:
        raise ProtocolError(f"a read with {len(rest)} bytes too many")
    return decode_tag(body[: _TAG.size]), pieces


def _split_pieces(body: bytes) -> tuple[Pieces, bytes]:
    if len(body) < _COUNT.size:
        raise ProtocolError("a transfer without pieces")
    (count,) = _COUNT.unpack_from(body)
    end = _COUNT.size + 3 * _NUMBER.itemsize * count
    if len(body) < end:
        raise ProtocolError(f"a transfer of {count} pieces in {len(body)} bytes")
    pieces = np.frombuffer(body, _NUMBER, 3 * count, _COUNT.size).reshape(count, 3)
    return pieces, body[end:]
