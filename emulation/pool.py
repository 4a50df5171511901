"""The digests in a KV pool: written by chunks, read by draws."""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.emulation.digests import (
    LAST_SLOTS,
    MULTIPLIER,
    Chain,
    Digests,
    Ints,
    draw,
    rotating_block,
    slot_inputs,
)
from tandem.engine.architecture.config import ModelConfig
from tandem.engine.memory.kv_blocks import KvBlocks, host_pages
from tandem.engine.schedule.sequence import PENDING, Chunk
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.messages import SamplingParams, encode

NUM_LAYERS = 4
PLAIN = SamplingParams()
_SECOND_COPY = np.uint64(0xD6E8FEB86659FD93)  # the second copy of a digest differs by it


@dataclass(slots=True)
class Work:
    """A chunk as it was launched: its sequence and tables may change before the step ends."""

    batch_row: int
    start: int
    token_ids: list[int]  # the last may be PENDING
    first_block: int  # ordinal of block_ids[0], which a draw or the first token reads
    block_ids: list[int]
    rotating_id: int  # block that the draw reads as well; -1: none
    samples: bool
    seed: int

    @classmethod
    def of(cls, chunk: Chunk, block_size: int) -> "Work":
        """Copy what the step will read of a chunk."""
        seq, start, end, samples = chunk
        if seq.prompt_scores is not None:
            raise InvalidRequestError("emulated devices score no prompt", param="prompt_logprobs")
        last = end - 1
        first = max(0, start - LAST_SLOTS) // block_size
        rotating = rotating_block(last, block_size) if samples else -1
        return cls(
            seq.batch_row,
            start,
            seq.token_ids[start:end],
            first,
            seq.block_table[first : last // block_size + 1],
            seq.block_table[rotating] if rotating >= 0 else -1,
            samples,
            seed_of(seq.sampling),
        )


def seed_of(sampling: SamplingParams) -> int:
    """Return the seed of draws: that of the request, 0 if it is greedy, folded with the others."""
    others = msgspec.structs.replace(sampling, temperature=1.0, seed=0, logprobs=None)
    seed = sampling.seed if sampling.temperature > 0 else 0
    if others == PLAIN:
        return seed
    return seed ^ int.from_bytes(blake2b(encode(others), digest_size=8).digest(), "little")


class HostBlocks(KvBlocks):
    """Blocks in this process's memory, zeroed."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int) -> None:
        super().__init__(config, num_blocks, block_size, "DRAM")
        pages = np.frombuffer(host_pages(self.num_bytes), config.dtype)  # owns them
        self.tensor = pages.reshape(self.shape)
        self.base_address: int = self.tensor.ctypes.data


class DigestPool:
    """The digests of all slots, and the last token that each batch row has drawn.

    Each lies twice in its block, so that every layer holds a part: a block of 4 layers, K and V and
    2 bytes in each, is [2, block_size] digests of 8 bytes. Draws notice copies that differ.
    """

    def __init__(self, pool: NDArray[Any], block_size: int, num_rows: int, token_ids: Ints) -> None:
        """`pool` is the memory of all blocks; draws give `token_ids`."""
        self._digests: Digests = pool.reshape(-1).view(np.uint64).reshape(-1, 2, block_size)
        self._block_size = block_size
        self._token_ids = token_ids
        self._drawn = np.zeros(num_rows, np.int64)
        self._chain = Chain()

    def compute(self, works: list[Work]) -> list[int]:
        """Write the slots of a step, and return a token for each chunk that samples."""
        self.write(works)
        sampled = [work for work in works if work.samples]
        return self._draw(sampled) if sampled else []

    def write(self, works: list[Work], num_layers: int = NUM_LAYERS) -> None:
        """Write the slots of a step, in its first layers (in pairs)."""
        copies = -(-num_layers // 2)
        for work in works:
            if work.token_ids[-1] == PENDING:
                work.token_ids[-1] = int(self._drawn[work.batch_row])
        singles = [work for work in works if len(work.token_ids) == 1]
        if singles:
            self._write_singles(singles, copies)
        for work in works:
            if len(work.token_ids) > 1:
                self._write_chunk(work, copies)

    def _read(self, slots: Ints) -> Digests:
        block_ids, offsets = np.divmod(slots, self._block_size)
        return _proven(*(self._digests[block_ids, copy, offsets] for copy in (0, 1)))

    def _put(self, slots: Ints, digests: Digests, copies: int) -> None:
        block_ids, offsets = np.divmod(slots, self._block_size)
        self._digests[block_ids, 0, offsets] = digests
        if copies > 1:
            self._digests[block_ids, 1, offsets] = digests ^ _SECOND_COPY

    def _write_singles(self, works: list[Work], copies: int) -> None:
        at = np.array([work.start for work in works])
        slots = self._last_slots(works, at)
        before = np.where(at > 0, self._read(slots[:, 1]), np.uint64(0))
        inputs = slot_inputs(np.array([work.token_ids[0] for work in works]), at)
        self._put(slots[:, 0], before * MULTIPLIER + inputs, copies)

    def _write_chunk(self, work: Work, copies: int) -> None:
        size, table = self._block_size, np.array(work.block_ids)
        at = np.arange(work.start - 1, work.start + len(work.token_ids))
        slots = table[at // size - work.first_block] * size + at % size
        before = self._read(slots[:1]) if work.start else np.zeros(1, np.uint64)
        digests = self._chain.extend(before, np.array(work.token_ids), work.start)
        self._put(slots[1:], digests, copies)

    def _draw(self, works: list[Work]) -> list[int]:
        at = np.array([work.start + len(work.token_ids) - 1 for work in works])
        last = self._read(self._last_slots(works, at))
        last[at[:, None] < np.arange(LAST_SLOTS)] = 0
        rotating = np.array([[work.rotating_id] for work in works])
        in_block = _proven(*(self._digests[rotating[:, 0], copy] for copy in (0, 1)))
        block = np.where(rotating >= 0, in_block, np.uint64(0))
        seeds = np.array([work.seed % 2**64 for work in works], np.uint64)
        drawn = draw(last, block, seeds, at, self._token_ids)
        self._drawn[[work.batch_row for work in works]] = drawn
        token_ids: list[int] = drawn.tolist()
        return token_ids

    def _last_slots(self, works: list[Work], at: Ints) -> Ints:
        """Return [num_works, LAST_SLOTS]: the slots of positions at, at - 1, ...; at least 0."""
        size = self._block_size
        back = np.maximum(at[:, None] - np.arange(LAST_SLOTS), 0)
        num_spanned = (LAST_SLOTS - 2) // size + 2  # blocks that so many slots can lie in
        newest = at // size
        ids = np.array(
            [
                [work.block_ids[max(0, i - work.first_block - k)] for k in range(num_spanned)]
                for work, i in zip(works, newest.tolist(), strict=True)
            ]
        )
        slots: Ints = np.take_along_axis(ids, newest[:, None] - back // size, 1) * size
        slots += back % size
        return slots


def _proven(first: Digests, second: Digests) -> Digests:
    """Return digests from their copies; others where the copies differ."""
    digests: Digests = first + MULTIPLIER * (first ^ second ^ _SECOND_COPY)
    return digests
