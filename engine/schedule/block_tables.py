"""The block tables of sequences over groups of layers, of which some may have a window.

The block of ordinal block i in group g is entry i * num_groups + g of a table: of a model with one
group, entry i.
"""

from itertools import chain

from tandem.engine.schedule.block_pool import BlockPool
from tandem.engine.schedule.sequence import Sequence
from tandem.engine.schedule.windows import NO_BLOCK, first_read
from tandem.runtime.wire.block_hash import num_blocks_of


def held_blocks(table: list[int]) -> list[int]:
    """Return the blocks of `table`, or of a part of one."""
    return [each for each in table if each != NO_BLOCK]


def extend_table(
    pool: BlockPool, table: list[int], num_ordinals: int, position: int, num_spare_blocks: int = 0
) -> bool:
    """Give `table` fresh blocks up to `num_ordinals`, as far as queries from `position` read them.

    False, with nothing changed, when fewer than `num_spare_blocks` would be left over. The blocks
    of a group lie side by side if they can.
    """
    if not pool.has_windows:  # there is one group: every growing sequence comes here
        num_fresh = num_ordinals - len(table)
        if num_spare_blocks and num_fresh + num_spare_blocks > pool.num_available:
            return False
        if (fresh := pool.allocate(num_fresh, after=table[-1] if table else None)) is None:
            return False
        table += fresh
        return True
    begin = len(table) // pool.num_groups
    starts = [max(begin, first_read(each, position, pool.block_size)) for each in pool.windows]
    num_fresh = sum(num_ordinals - start for start in starts)
    if num_fresh + num_spare_blocks > pool.num_available:
        return False
    fresh = pool.allocate(num_fresh, after=table[-1] if table else None)
    assert fresh is not None
    columns, num_given = [], 0
    for start in starts:
        end = num_given + num_ordinals - start
        columns.append([NO_BLOCK] * (start - begin) + fresh[num_given:end])
        num_given = end
    table += chain.from_iterable(zip(*columns, strict=True))
    return True


def cover_chunk(pool: BlockPool, seq: Sequence, end: int, num_spare_blocks: int) -> int:
    """Give `seq` blocks for positions up to `end`; return the end of those that have some.

    They are fewer where fewer than `num_spare_blocks` would be left over.
    """
    num_covered = len(seq.block_table) // pool.num_groups
    num_missing = num_blocks_of(end, pool.block_size) - num_covered
    num_fresh = min(num_missing, (pool.num_available - num_spare_blocks) // pool.num_groups)
    if num_fresh > 0:
        num_covered += num_fresh
        has_grown = extend_table(pool, seq.block_table, num_covered, seq.num_launched_tokens)
        assert has_grown
    return min(end, num_covered * pool.block_size)


def free_passed(pool: BlockPool, seq: Sequence) -> None:
    """Free the blocks of `seq` that the window of every later query has passed.

    The last computed token may be computed again.
    """
    table, passed, ends = seq.block_table, [], []
    for group, window in enumerate(pool.windows):
        if not window:
            continue
        ends.append(first_read(window, seq.num_computed_tokens - 1, pool.block_size))
        for ordinal in range(seq.num_passed_blocks, ends[-1]):
            entry = ordinal * pool.num_groups + group
            if table[entry] != NO_BLOCK:
                passed.append(table[entry])
                table[entry] = NO_BLOCK
    seq.num_passed_blocks = min(ends, default=0)
    if passed:
        pool.free(passed)
