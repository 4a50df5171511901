"""The bytes that a transfer moves: parts of blocks, merged into few long pieces."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.runtime.errors import TransferError
from tandem.transfer.transport import BlockGrid, Indices, Parts

MAX_PIECE_BYTES = 1 << 30

Pieces = NDArray[np.uint32]  # [num_pieces, 3]: (block, offset in it, length), of the peer's pool
Span = tuple[int, int]  # (offset in the own pool, length); the i-th goes with the i-th piece
Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pairing:
    """Every part of every block of two pools, as byte offsets from the pools' beginnings."""

    local: Numbers  # [local blocks * parts]
    remote: Numbers  # [remote blocks * parts]
    lengths: Numbers  # [parts]
    remote_block_bytes: int

    @classmethod
    def of(
        cls, local: BlockGrid, local_parts: Parts, remote: BlockGrid, remote_parts: Parts
    ) -> "Pairing":
        lengths = np.array([length for _, length in local_parts], np.int64)
        if [length for _, length in remote_parts] != lengths.tolist():
            raise TransferError("the parts of the two sides differ in length")
        if min(lengths, default=0) <= 0:
            raise TransferError("parts of no bytes, or none")
        return cls(
            _offsets(local, local_parts),
            _offsets(remote, remote_parts),
            lengths,
            remote.block_bytes,
        )

    def pick(self, local_indices: Indices, remote_indices: Indices) -> tuple[list[Span], Pieces]:
        """Return the bytes at these indices, merged where they are adjacent on both sides."""
        ours, theirs = np.asarray(local_indices, np.int64), np.asarray(remote_indices, np.int64)
        if not len(ours) == len(theirs):
            raise TransferError(f"{len(ours)} local parts for {len(theirs)} remote ones")
        if not len(ours):
            return [], np.empty((0, 3), np.uint32)
        for indices, size in ((ours, len(self.local)), (theirs, len(self.remote))):
            if indices.min() < 0 or indices.max() >= size:
                raise TransferError(f"a part beyond the {size} of its pool")
        part = ours % len(self.lengths)
        if not np.array_equal(part, theirs % len(self.lengths)):
            raise TransferError("parts of one side go with other parts of the other")
        return self._merged(self.local[ours], self.remote[theirs], self.lengths[part])

    def _merged(
        self, local: Numbers, remote: Numbers, lengths: Numbers
    ) -> tuple[list[Span], Pieces]:
        follows = (local[1:] == (local + lengths)[:-1]) & (remote[1:] == (remote + lengths)[:-1])
        begins = np.concatenate(([True], ~follows))
        # A long run is cut at multiples of the limit, so that each length fits its field.
        before = np.cumsum(lengths) - lengths
        nth_cut = (before - before[begins][np.cumsum(begins) - 1]) // MAX_PIECE_BYTES
        begins[1:] |= nth_cut[1:] != nth_cut[:-1]
        starts = np.flatnonzero(begins)
        total = np.add.reduceat(lengths, starts)
        block, offset = np.divmod(remote[starts], self.remote_block_bytes)
        pieces = np.stack((block, offset, total), axis=1).astype(np.uint32)
        return list(zip(local[starts].tolist(), total.tolist(), strict=True)), pieces


def spans_of(pieces: Pieces, grid: BlockGrid) -> list[Span] | None:
    """Return a peer's pieces as spans of the own pool; None if one is not inside the pool."""
    block, offset, length = pieces.astype(np.int64).T
    begin = block * grid.block_bytes + offset
    fits = (
        (block < grid.num_blocks)
        & (offset < grid.block_bytes)
        & (length > 0)
        & (begin + length <= grid.num_blocks * grid.block_bytes)
    )
    if not fits.all():
        return None
    return list(zip(begin.tolist(), length.tolist(), strict=True))


def _offsets(grid: BlockGrid, parts: Parts) -> Numbers:
    if grid.block_bytes > MAX_PIECE_BYTES:
        raise TransferError(f"blocks of {grid.block_bytes} bytes are too large")
    if any(offset < 0 or offset + length > grid.block_bytes for offset, length in parts):
        raise TransferError(f"parts beyond the {grid.block_bytes} bytes of a block")
    blocks = np.arange(grid.num_blocks, dtype=np.int64) * grid.block_bytes
    return np.add.outer(blocks, [offset for offset, _ in parts]).ravel()
