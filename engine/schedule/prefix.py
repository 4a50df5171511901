"""Blocks that sequences share by the hashes of their tokens, and prefixes from elsewhere."""

from dataclasses import dataclass

from tandem.engine.schedule.block_pool import BlockPool
from tandem.engine.schedule.block_tables import held_blocks
from tandem.engine.schedule.sequence import Sequence
from tandem.engine.schedule.windows import NO_BLOCK
from tandem.runtime.wire.block_hash import block_hashes


def shareable_hashes(seq: Sequence, pool: BlockPool) -> list[bytes]:
    """Return the hashes of the leading blocks that `seq` could take from the prefix cache.

    Shared blocks are never written, so the block of the last token is not among them. A prompt
    whose log probabilities are wanted takes none, because all of its positions must be computed.
    """
    if not pool.enable_prefix_cache or seq.prompt_scores is not None:
        return []
    num_tokens = seq.num_known_tokens
    _hash_full_blocks(seq, num_tokens, pool.block_size)
    return seq.block_hashes[: (num_tokens - 1) // pool.block_size]


def publish_full_blocks(seq: Sequence, pool: BlockPool) -> None:
    """Publish the full blocks of `seq` whose K/V is in the pool."""
    num_full = seq.num_computed_tokens // pool.block_size
    if pool.enable_prefix_cache:
        _hash_full_blocks(seq, seq.num_computed_tokens, pool.block_size)
        begin, num_groups = seq.num_published_blocks, pool.num_groups
        for group in range(num_groups):
            block_ids = seq.block_table[
                begin * num_groups + group : num_full * num_groups : num_groups
            ]
            pool.publish(block_ids, seq.block_hashes[begin:num_full], group)
    seq.num_published_blocks = num_full


def _hash_full_blocks(seq: Sequence, num_tokens: int, block_size: int) -> None:
    """Extend the chain of hashes over the blocks that the first `num_tokens` tokens fill."""
    hashed = len(seq.block_hashes)
    if (hashed + 1) * block_size <= num_tokens:  # a short prompt has none
        seq.block_hashes += block_hashes(
            seq.token_ids[hashed * block_size : num_tokens],
            block_size,
            salt=seq.cache_salt,
            parent=seq.block_hashes[-1] if hashed else None,
        )


@dataclass(slots=True, frozen=True)
class PrefixPull:
    """The blocks of a prompt's head whose K/V is pulled from elsewhere before the prompt runs."""

    block_table: list[int]  # with what was cached already, held so that it stays
    block_hashes: list[bytes]  # of these blocks
    fresh: list[int]  # entries of the table to be filled


class PrefixPulls:
    """The pulls under way, by request id."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._pulls: dict[str, PrefixPull] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pulls

    def block_tables(self) -> list[list[int]]:
        return [pull.block_table for pull in self._pulls.values()]

    def reserve(
        self, seq: Sequence, num_blocks: int, num_spare_blocks: int
    ) -> list[tuple[int, int]] | None:
        """Hold until `end` all that is read of the first `num_blocks` ordinal blocks of `seq`.

        Returns (entry, block id) of those to be filled; nothing is held when there are none. None
        without a prefix cache, or when fewer than `num_spare_blocks` would be left over.
        """
        pool = self._pool
        if not pool.enable_prefix_cache:
            return None
        hashes = shareable_hashes(seq, pool)[:num_blocks]
        if pool.count_prefix(hashes) == len(hashes):
            return []
        table = [NO_BLOCK] * (len(hashes) * pool.num_groups)
        missing = []
        for entry in pool.entries_read(len(hashes)):
            block_id = pool.hold_cached(hashes[entry // pool.num_groups], entry % pool.num_groups)
            if block_id is None:
                missing.append(entry)
            else:
                table[entry] = block_id
        if len(missing) + num_spare_blocks > pool.num_available:
            pool.free(held_blocks(table))
            return None
        before = table[missing[0] - 1] if missing[0] else None
        fresh = pool.allocate(len(missing), after=before)
        assert fresh is not None
        for entry, block_id in zip(missing, fresh, strict=True):
            table[entry] = block_id
        self._pulls[seq.request_id] = PrefixPull(table, hashes, missing)
        return list(zip(missing, fresh, strict=True))

    def set_aside(self, request_id: str, name: str) -> None:
        """Hold the blocks of a pull, if it is under way, under another name until that is ended."""
        if (pull := self._pulls.pop(request_id, None)) is not None:
            self._pulls[name] = pull

    def end(self, request_id: str, *, proven: bool, quarantined: bool = False) -> bool:
        """Free a pull's blocks, published if `proven`. False when there is no such pull.

        `quarantined`: writes into the blocks to be filled may still land.
        """
        pull = self._pulls.pop(request_id, None)
        if pull is None:
            return False
        pool, table = self._pool, pull.block_table
        if proven:
            for entry in pull.fresh:
                ordinal, group = divmod(entry, pool.num_groups)
                pool.publish([table[entry]], [pull.block_hashes[ordinal]], group)
        elif quarantined:
            pool.quarantine([table[entry] for entry in pull.fresh])
            for entry in pull.fresh:
                table[entry] = NO_BLOCK
        pool.free(held_blocks(table))
        return True
