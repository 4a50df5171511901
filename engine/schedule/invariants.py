"""Assertions over a whole scheduler, for tests and for idle times."""

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

from tandem.engine.schedule.block_pool import BlockPool
from tandem.engine.schedule.block_tables import held_blocks
from tandem.engine.schedule.sequence import PENDING, Sequence, SequenceStatus
from tandem.engine.schedule.windows import NO_BLOCK, first_read

if TYPE_CHECKING:
    from tandem.engine.schedule.scheduler import Scheduler


def check_scheduler(scheduler: "Scheduler", free_rows: list[int]) -> None:
    """Assert that states, tables, batch rows and the pool's references agree."""
    waiting, running, remote = scheduler.waiting, scheduler.running, scheduler.remote
    exported, draining = scheduler.exported, scheduler.draining
    held = [*running.values(), *remote.values(), *exported.values(), *draining]
    for seq in held:
        _check_table(seq, scheduler.pool)
    tables = [*scheduler.pulls.block_tables(), *(seq.block_table for seq in held)]
    num_holders = Counter(chain.from_iterable(held_blocks(table) for table in tables))
    scheduler.pool.check_invariants(num_holders)
    for seq in running.values():
        num_pending = len(seq.token_ids) - seq.num_known_tokens
        assert seq.num_launched_tokens <= len(seq.token_ids) and num_pending <= seq.in_flight
    rows = [seq.batch_row for seq in running.values()]
    assert sorted(rows + free_rows) == list(range(scheduler.max_num_seqs))
    assert len(running) + len(remote) <= scheduler.max_num_seqs
    for group, status in (
        (waiting, SequenceStatus.WAITING),
        (running, SequenceStatus.RUNNING),
        (remote, SequenceStatus.WAITING_FOR_REMOTE_KVS),
        (exported, SequenceStatus.FINISHED),
    ):
        assert all(seq.status is status for seq in group.values())
    for seq in chain(waiting.values(), remote.values()):
        assert seq.batch_row < 0 and seq.in_flight == 0 and PENDING not in seq.token_ids
        assert not seq.block_table or seq.status is not SequenceStatus.WAITING
    assert all(seq.in_flight > 0 and scheduler.num_in_flight > 0 for seq in draining)


def _check_table(seq: Sequence, pool: BlockPool) -> None:
    """Assert that `seq` has every block that its launched steps and later ones touch."""
    num_ordinals, rest = divmod(len(seq.block_table), pool.num_groups)
    assert not rest and num_ordinals * pool.block_size >= seq.num_launched_tokens
    assert seq.num_computed_tokens <= seq.num_launched_tokens
    assert seq.num_published_blocks * pool.block_size <= seq.num_computed_tokens
    is_reserved = seq.status is SequenceStatus.WAITING_FOR_REMOTE_KVS
    position = seq.num_given_tokens if is_reserved else seq.num_computed_tokens
    for group, window in enumerate(pool.windows):
        column = seq.block_table[group :: pool.num_groups]
        assert NO_BLOCK not in column[first_read(window, position, pool.block_size) :]
