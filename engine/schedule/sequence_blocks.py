"""The blocks of one sequence: those that it needs, takes when it starts, and gives back."""

from tandem.engine.schedule.block_pool import BlockPool
from tandem.engine.schedule.block_tables import extend_table, held_blocks
from tandem.engine.schedule.prefix import shareable_hashes
from tandem.engine.schedule.sequence import Sequence
from tandem.engine.schedule.windows import num_blocks_needed
from tandem.runtime.wire.block_hash import num_blocks_of


def num_needed(pool: BlockPool, seq: Sequence) -> int:
    """Count the blocks with which all tokens of `seq` can be computed."""
    return num_blocks_needed(pool.windows, len(seq.token_ids), pool.block_size)


def num_missing(pool: BlockPool, seq: Sequence, table: list[int]) -> int:
    """Count the blocks that `seq` needs and `table` does not hold."""
    return max(0, num_needed(pool, seq) - len(held_blocks(table)))


def take_blocks(
    pool: BlockPool, seq: Sequence, num_spare_blocks: int, *, is_remote: bool = False
) -> bool:
    """Give `seq` blocks for all its tokens, leading ones from the prefix cache, or none.

    Where layers have windows: those that tokens after its own read if all K/V `is_remote`, and
    else the cached ones, when there are enough others for its chunks to take.
    """
    num_tokens = len(seq.token_ids)
    table = pool.match_prefix(shareable_hashes(seq, pool))
    num_cached = len(table) // pool.num_groups
    if pool.has_windows and not is_remote:
        has_room = num_missing(pool, seq, table) + num_spare_blocks <= pool.num_available
    else:
        num_ordinals = num_blocks_of(num_tokens, pool.block_size)
        has_room = extend_table(pool, table, num_ordinals, num_tokens - 1, num_spare_blocks)
    if not has_room:
        pool.free(held_blocks(table))
        return False
    seq.block_table = table
    seq.num_published_blocks = num_cached
    seq.num_computed_tokens = num_cached * pool.block_size
    seq.num_launched_tokens = seq.num_computed_tokens
    if num_tokens == seq.num_given_tokens:  # else it was preempted
        seq.num_cached_tokens = seq.num_computed_tokens
    return True


def free_blocks(pool: BlockPool, seq: Sequence, *, quarantined: bool = False) -> None:
    """Give all blocks of `seq` back; `quarantined`: writes into those reserved may still land."""
    num_freed = seq.num_reserved_cached_blocks if quarantined else len(seq.block_table)
    pool.quarantine(held_blocks(seq.block_table[num_freed:]))
    pool.free(held_blocks(seq.block_table[:num_freed]))
    seq.block_table = []
    seq.num_computed_tokens = 0
    seq.num_launched_tokens = 0
    seq.num_published_blocks = 0
    seq.num_passed_blocks = 0
    seq.num_reserved_cached_blocks = 0
