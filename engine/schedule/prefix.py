"""Blocks that sequences share by the hashes of their tokens, and prefixes from elsewhere."""

from dataclasses import dataclass

from tandem.engine.schedule.block_pool import BlockPool
from tandem.engine.schedule.sequence import Sequence
from tandem.runtime.block_hash import block_hashes


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
        for i in range(seq.num_published_blocks, num_full):
            pool.publish(seq.block_table[i], seq.block_hashes[i])
    seq.num_published_blocks = num_full


def _hash_full_blocks(seq: Sequence, num_tokens: int, block_size: int) -> None:
    """Extend the chain of hashes over the blocks that the first `num_tokens` tokens fill."""
    hashed = len(seq.block_hashes)
    if (hashed + 1) * block_size <= num_tokens:
        seq.block_hashes += block_hashes(
            seq.token_ids[hashed * block_size : num_tokens],
            block_size,
            salt=seq.cache_salt,
            parent=seq.block_hashes[-1] if hashed else None,
        )


def take_blocks(
    pool: BlockPool, hashes: list[bytes], num_blocks: int, num_spare_blocks: int
) -> tuple[list[int], int] | None:
    """Take `num_blocks` blocks; return them and the number of leading ones cached under `hashes`.

    None, with nothing changed, when fewer than `num_spare_blocks` would be left over.
    """
    cached = pool.match_prefix(hashes)
    num_fresh = num_blocks - len(cached)
    fresh = None
    if num_fresh + num_spare_blocks <= pool.num_available:
        fresh = pool.allocate(num_fresh, after=cached[-1] if cached else None)
    if fresh is None:
        pool.free(cached)
        return None
    return cached + fresh, len(cached)


@dataclass(slots=True, frozen=True)
class PrefixPull:
    """The blocks of a prompt's head whose K/V is pulled from elsewhere before the prompt runs."""

    block_table: list[int]
    block_hashes: list[bytes]  # of these blocks
    num_cached_blocks: int  # leading ones that were cached already; held, so that they stay


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
        """Hold the first `num_blocks` of `seq`'s blocks that can be shared until `end`.

        Returns (ordinal, block id) of those to be filled; nothing is held when there are none. None
        without a prefix cache, or when fewer than `num_spare_blocks` would be left over.
        """
        pool = self._pool
        if not pool.enable_prefix_cache:
            return None
        hashes = shareable_hashes(seq, pool)[:num_blocks]
        if pool.count_prefix(hashes) == len(hashes):
            return []
        taken = take_blocks(pool, hashes, len(hashes), num_spare_blocks)
        if taken is None:
            return None
        table, num_cached = taken
        self._pulls[seq.request_id] = PrefixPull(table, hashes, num_cached)
        return list(enumerate(table))[num_cached:]

    def end(self, request_id: str, *, proven: bool, quarantined: bool = False) -> bool:
        """Free a pull's blocks, published if `proven`. False when there is no such pull.

        `quarantined`: writes into the blocks to be filled may still land.
        """
        pull = self._pulls.pop(request_id, None)
        if pull is None:
            return False
        num_cached, num_freed = pull.num_cached_blocks, len(pull.block_table)
        if proven:
            for i in range(num_cached, num_freed):
                self._pool.publish(pull.block_table[i], pull.block_hashes[i])
        elif quarantined:
            self._pool.quarantine(pull.block_table[num_cached:])
            num_freed = num_cached
        self._pool.free(pull.block_table[:num_freed])
        return True
