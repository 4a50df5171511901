"""Lists of memory pieces as packed integers, exchanged by two workers in place of a pickle.

    4 bytes   magic "TNB1"
    1 byte    memory: 0 DRAM, 1 VRAM
    3 bytes   zero
    32 bytes  for each run: address, bytes of one piece, device id, number of pieces (u64, little)

A run is a row of adjacent pieces of one size: the blocks of a whole tensor are one run.
"""

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.runtime.errors import ProtocolError
from tandem.transfer.transport import Memory

_HEADER = struct.Struct("<4sB3x")
_MAGIC = b"TNB1"
_MEMORIES: tuple[Memory, ...] = ("DRAM", "VRAM")
_RUN_INTS = 4
_MAX_PIECES = 1 << 24  # of one list: limits the table of a malicious peer to 256 MiB
_MAX_ADDRESS = (1 << 63) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """A list of pieces. `table`: [num_pieces, 3] of (address, bytes, device id)."""

    memory: Memory
    table: NDArray[np.uint64]

    @property
    def lengths(self) -> NDArray[np.uint64]:
        """[num_pieces], bytes."""
        lengths: NDArray[np.uint64] = self.table[:, 1]
        return lengths


def pack(pieces: Pieces) -> bytes:
    """Pack the pieces in their order; a run takes 32 bytes."""
    address, length, device = pieces.table.T
    continues = (
        (address[1:] == address[:-1] + length[:-1])
        & (length[1:] == length[:-1])
        & (device[1:] == device[:-1])
    )
    first = np.flatnonzero(np.concatenate(([True], ~continues)))
    counts = np.diff(np.append(first, len(address)))
    runs = np.empty((len(first), _RUN_INTS), dtype="<u8")
    runs[:, :3] = pieces.table[first]
    runs[:, 3] = counts
    return _HEADER.pack(_MAGIC, _MEMORIES.index(pieces.memory)) + runs.tobytes()


def unpack(data: bytes) -> Pieces:
    """Return the pieces that a peer packed. Raise ProtocolError for anything else."""
    size = len(data) - _HEADER.size
    if size <= 0 or size % (8 * _RUN_INTS):
        raise ProtocolError(f"block descriptors: {len(data)} bytes are not a list of descriptors")
    magic, memory = _HEADER.unpack_from(data)
    if magic != _MAGIC or memory >= len(_MEMORIES):
        raise ProtocolError("block descriptors: not made by get_xfer_descs() of tandem.sdk.nixl")
    runs = np.frombuffer(data, dtype="<u8", offset=_HEADER.size).reshape(-1, _RUN_INTS)
    _check(runs)
    counts = runs[:, 3].astype(np.int64)
    table = np.repeat(runs[:, :3].astype(np.uint64), counts, axis=0)
    within = np.arange(len(table)) - np.repeat(np.cumsum(counts) - counts, counts)
    table[:, 0] += within.astype(np.uint64) * table[:, 1]
    return Pieces(_MEMORIES[memory], table)


def _check(runs: NDArray[np.uint64]) -> None:
    """Check the runs with Python's integers, which do not wrap around."""
    num_pieces = 0
    for address, length, _, count in runs.tolist():
        num_pieces += count
        if not count or not length or address + length * count > _MAX_ADDRESS:
            raise ProtocolError(
                f"block descriptors: {count} pieces of {length} bytes at {address:#x}"
            )
        if num_pieces > _MAX_PIECES:
            raise ProtocolError(f"block descriptors: more than {_MAX_PIECES} pieces")
