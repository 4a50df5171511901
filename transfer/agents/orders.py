"""Orders of rank 0 about the transfers of another rank, and their answers: frames over a socket.

Both run the same code on one machine, and neither checks what the other says.
"""

import asyncio
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.transfer.agents.rank_agent import Mark, Notice
from tandem.transfer.agents.reactor import PeerRank, Selection
from tandem.transfer.layout import KvLayout
from tandem.transfer.transport import BlockGrid, Operation, Parts

_LENGTH = struct.Struct("<Q")


class Order(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An order of rank 0; `Done` or `Failed` answers it by its number."""

    number: int


class Open(Order, frozen=True):
    """Open the agent. `config` is a TransferConfig as JSON; `environment` is set before."""

    config: str
    layout: KvLayout
    instance_id: str
    epoch: str
    rank: int
    environment: dict[str, str]


class Expect(Order, frozen=True):
    """RankAgent.expect; it has no answer."""

    change: int


class Connect(Order, frozen=True):
    """RankAgent.connect."""

    peer: PeerRank
    metadata: bytes
    grid: BlockGrid


class Prepare(Order, frozen=True):
    """RankAgent.prepare."""

    peer: PeerRank
    selection: Selection


class Disconnect(Order, frozen=True):
    """RankAgent.disconnect."""

    peer_instance: str


class Transfer(Order, frozen=True):
    """RankAgent.transfer. Processes of one machine read the same `time.perf_counter()`."""

    operation: Operation
    peer: PeerRank
    selection: Selection
    pairs: Sequence[tuple[int, int]]
    notice: Notice
    checked: Parts | None
    after: Mark
    post_before: float | None


class Checksum(Order, frozen=True):
    """RankAgent.checksums."""

    block_ids: Sequence[int]
    parts: Parts


class Close(Order, frozen=True):
    """RankAgent.close."""


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An order's result, in plain values."""

    number: int
    result: Any
    longest_write_s: float


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The TransferError of an order."""

    number: int
    message: str


class Heard(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message of a peer."""

    data: bytes


AnyOrder = Open | Expect | Connect | Prepare | Disconnect | Transfer | Checksum | Close
AnyReport = Done | Failed | Heard


def _encode_range(value: object) -> list[int]:
    assert isinstance(value, range), value
    return [value.start, value.stop]


def _decode_range(kind: type, value: Any) -> Any:
    assert kind is range, kind
    return range(*value)


_encode = msgspec.msgpack.Encoder(enc_hook=_encode_range).encode
decode_order = msgspec.msgpack.Decoder(AnyOrder, dec_hook=_decode_range).decode
decode_report = msgspec.msgpack.Decoder(AnyReport).decode


def send(stream: asyncio.StreamWriter, message: AnyOrder | AnyReport) -> None:
    """Send one message; does not wait."""
    data = _encode(message)
    stream.write(_LENGTH.pack(len(data)) + data)


async def receive(stream: asyncio.StreamReader) -> bytes | None:
    """Return the next message, encoded; None when the other end is closed."""
    try:
        [length] = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
        return await stream.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
