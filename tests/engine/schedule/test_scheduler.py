from types import SimpleNamespace

import pytest

from tandem.engine.config import EngineConfig
from tandem.engine.schedule.block_pool import BlockPool
from tandem.engine.schedule.outputs import backlog_of
from tandem.engine.schedule.scheduler import MAX_FORCED_TOKENS, Scheduler
from tandem.engine.schedule.sequence import Chunk, Sequence, SequenceStatus
from tandem.engine.schedule.step_cost import StepCost
from tandem.runtime.wire.messages import SamplingParams, StopConditions

BLOCK_SIZE = 4


def make_scheduler(
    num_blocks: int = 64, windows: tuple[int, ...] = (0,), **config: object
) -> Scheduler:
    engine_config = EngineConfig(
        **({"block_size": BLOCK_SIZE, "max_num_batched_tokens": 99} | config)
    )
    pool = BlockPool(num_blocks, BLOCK_SIZE, engine_config.enable_prefix_cache, windows)
    return Scheduler(engine_config, pool, StepCost(max_step_s=3600))


def spans(chunks: list[Chunk]) -> list[tuple[str, int, int]]:
    return [(seq.request_id, start, end) for seq, start, end, _ in chunks]


def step(scheduler: Scheduler, token_id: int = 7) -> list[tuple[str, int, int]]:
    """Schedule, and pretend that every chunk was computed and sampled `token_id`."""
    chunks = launch(scheduler)
    collect(scheduler, chunks, token_id)
    return spans(chunks)


def launch(scheduler: Scheduler) -> list[Chunk]:
    chunks = scheduler.schedule()
    assert chunks is not None
    if chunks:
        scheduler.launched(chunks)
    scheduler.check_invariants()
    assert sum(end - start for _, start, end in spans(chunks)) <= scheduler.max_num_batched_tokens
    assert len(chunks) <= scheduler.max_num_seqs
    return chunks


def collect(scheduler: Scheduler, chunks: list[Chunk], token_id: int = 7) -> None:
    if chunks:
        scheduler.collected(chunks)
    for seq, _, end, samples in chunks:
        if samples:
            seq.token_ids[end : end + 1] = [token_id]
    scheduler.check_invariants()


def prompt(num_tokens: int, first: int = 100) -> list[int]:
    return list(range(first, first + num_tokens))


def test_sequences_start_in_order_of_arrival_within_the_token_budget(fake: SimpleNamespace) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    for i, length in enumerate((4, 4, 4)):
        scheduler.add(fake.make_seq(f"r{i}", prompt(length, 100 * i)))
    assert step(scheduler) == [("r0", 0, 4), ("r1", 0, 4), ("r2", 0, 2)]
    assert step(scheduler) == [("r0", 4, 5), ("r1", 4, 5), ("r2", 2, 4)]


def test_decodes_come_first_and_prompts_get_the_chunk_that_is_left(fake: SimpleNamespace) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=40, prefill_chunk_tokens=6)
    scheduler.add(fake.make_seq("old", prompt(3), 50))
    assert step(scheduler) == [("old", 0, 3)]
    scheduler.add(fake.make_seq("new", prompt(20, 500), 50))
    assert step(scheduler) == [("old", 3, 4), ("new", 0, 6)]
    assert step(scheduler) == [("old", 4, 5), ("new", 6, 12)]
    scheduler.drop(scheduler.running["old"])
    assert step(scheduler) == [("new", 12, 20)]  # nobody decodes: the whole budget
    scheduler.add(fake.make_seq("next", prompt(60, 900), 50))
    scheduler.prefill_chunk_tokens = 99
    assert step(scheduler) == [("new", 20, 21), ("next", 0, 39)]


def test_forced_tokens_have_a_chunk_each_as_far_as_there_are_batch_rows(
    fake: SimpleNamespace,
) -> None:
    scheduler = make_scheduler(max_num_seqs=4)
    for name, first in (("a", 100), ("b", 200)):
        scheduler.add(fake.make_seq(name, prompt(4, first), 50))
    step(scheduler)
    for seq in scheduler.running.values():
        seq.token_ids += [8, 9]
    assert step(scheduler) == [("a", 4, 5), ("a", 5, 6), ("a", 6, 7), ("b", 4, 5)]
    assert step(scheduler) == [("a", 7, 8), ("b", 5, 6), ("b", 6, 7)]


def test_as_many_forced_tokens_as_a_grammar_gives_at_once_are_computed_as_decodes(
    fake: SimpleNamespace,
) -> None:
    scheduler, end = make_scheduler(), 4 + MAX_FORCED_TOKENS
    scheduler.add(fake.make_seq("a", prompt(4), 50))
    step(scheduler)
    scheduler.running["a"].token_ids += [8] * (MAX_FORCED_TOKENS - 1)
    assert step(scheduler) == [("a", at, at + 1) for at in range(4, end)]


def test_a_token_that_was_put_off_is_computed_again_and_no_other(fake: SimpleNamespace) -> None:
    scheduler = make_scheduler()
    seq = fake.make_seq("a", prompt(6), 50)
    scheduler.add(seq)
    chunks = launch(scheduler)
    scheduler.put_off(seq, 6)
    scheduler.collected(chunks)
    assert spans(launch(scheduler)) == [("a", 5, 6)]


def test_there_are_never_more_sequences_than_batch_rows(fake: SimpleNamespace) -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for i in range(3):
        scheduler.add(fake.make_seq(f"r{i}", prompt(4, 100 * i)))
    assert len(step(scheduler)) == 2
    assert not scheduler.reserve(fake.make_seq("remote", prompt(4)))
    scheduler.finish(scheduler.running["r0"])
    assert ("r2", 0, 4) in step(scheduler)


def test_a_sequence_hears_of_its_batch_row_in_its_turn_and_may_be_reserved_for_then(
    fake: SimpleNamespace,
) -> None:
    scheduler, heard = make_scheduler(max_num_seqs=2), list[str]()

    def wait_for_a_row(name: str, first: int, *, goes_away: bool) -> None:
        seq = fake.make_seq(name, prompt(4, first))

        def on_room() -> bool:
            heard.append(name)
            return not goes_away or scheduler.reserve(seq)

        seq.on_room = on_room
        scheduler.add(seq)

    for i in range(2):
        scheduler.add(fake.make_seq(f"r{i}", prompt(4, 100 * i)))
    wait_for_a_row("away", 300, goes_away=True)
    scheduler.add(fake.make_seq("next", prompt(4, 400)))
    wait_for_a_row("here", 500, goes_away=False)
    step(scheduler)
    assert not heard
    assert backlog_of(scheduler).num_waiting_tokens == 4 + 2  # a token of each that runs
    assert backlog_of(scheduler, with_undecided=True).num_waiting_tokens == 12 + 2
    scheduler.finish(scheduler.running["r0"])
    assert step(scheduler) == [("r1", 4, 5)]
    assert (heard, list(scheduler.remote)) == (["away"], ["away"])
    scheduler.finish(scheduler.running["r1"])
    assert step(scheduler) == [("next", 0, 4)]
    scheduler.drop(scheduler.remote["away"])
    assert step(scheduler) == [("next", 4, 5), ("here", 0, 4)]
    assert heard == ["away", "here"]
    scheduler.check_invariants()


def test_a_sequence_that_lacks_blocks_hears_again_when_some_came_back_and_nobody_passes_it(
    fake: SimpleNamespace,
) -> None:
    scheduler, tried = make_scheduler(num_blocks=8), list[bool]()
    away = fake.make_seq("away", prompt(16, 300))

    def on_room() -> bool:
        tried.append(scheduler.reserve(away))
        return tried[-1]

    scheduler.add(fake.make_seq("old", prompt(16)))
    step(scheduler)
    assert scheduler.has_room and scheduler.returns_blocks
    away.on_room = on_room
    scheduler.add(away)
    scheduler.add(fake.make_seq("small", prompt(2, 500)))
    for _ in range(3):
        assert [name for name, _, _ in step(scheduler)] == ["old"]
    assert tried == [False] and scheduler.has_row and not scheduler.has_room
    scheduler.finish(scheduler.running["old"])
    assert step(scheduler) == [("small", 0, 2)]
    assert tried == [False, True] and list(scheduler.remote) == ["away"] and scheduler.has_room


def test_nobody_waits_for_blocks_that_do_not_come_back_soon(fake: SimpleNamespace) -> None:
    scheduler, windowed = make_scheduler(num_blocks=8), make_scheduler(windows=(0, 8))
    assert not scheduler.returns_blocks
    for each in (scheduler, windowed):
        each.add(fake.make_seq("old", prompt(4)))
        step(each)
    assert scheduler.returns_blocks and not windowed.returns_blocks
    scheduler.drop(scheduler.running["old"])
    remote = fake.make_seq("remote", prompt(12, 300))
    assert scheduler.reserve(remote) and scheduler.returns_blocks
    heard = list[bool]()
    alone = fake.make_seq("alone", prompt(28, 500))

    def on_room() -> bool:
        heard.append(scheduler.returns_blocks)
        return not heard[-1]

    alone.on_room = on_room
    scheduler.add(alone)
    assert step(scheduler) == []
    scheduler.drop(remote, quarantined=True)  # no block comes back
    step(scheduler)
    assert heard == [True, False] and alone.on_room is None


def test_a_step_never_has_more_tokens_than_its_budget(fake: SimpleNamespace) -> None:
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=3)
    remote = [fake.make_seq(f"remote{i}", prompt(4, 100 * i)) for i in range(8)]
    reserved = [seq for seq in remote if scheduler.reserve(seq)]
    for seq in reserved:
        scheduler.admit(seq)
        seq.token_ids.append(7)
    for i in range(8):
        scheduler.add(fake.make_seq(f"r{i}", prompt(5, 2000 + 100 * i)))
    for _ in range(20):
        assert 0 < sum(end - start for _, start, end in step(scheduler)) <= 3


def test_the_last_token_of_a_known_prompt_is_computed_in_a_block_of_its_own(
    fake: SimpleNamespace,
) -> None:
    scheduler = make_scheduler()
    scheduler.add(fake.make_seq("first", prompt(8)))
    step(scheduler)
    shared = scheduler.running["first"].block_table
    again = fake.make_seq("again", prompt(8))
    assert scheduler.num_prefix_blocks(again) == 1
    scheduler.add(again)
    assert ("again", 4, 8) in step(scheduler)
    assert again.block_table[0] == shared[0]
    assert again.block_table[1] != shared[1]
    assert again.num_cached_tokens == 4


def test_generated_tokens_are_shared_too(fake: SimpleNamespace) -> None:
    scheduler = make_scheduler()
    first = fake.make_seq("first", prompt(6))
    scheduler.add(first)
    for _ in range(4):
        step(scheduler)
    scheduler.finish(first)
    follow_up = fake.make_seq("follow-up", first.token_ids[:9])
    assert scheduler.num_prefix_blocks(follow_up) == 2


def test_a_prompt_that_another_worker_computed_is_shared_once_it_is_admitted(
    fake: SimpleNamespace,
) -> None:
    scheduler = make_scheduler()
    remote, again = (fake.make_seq(name, prompt(9)) for name in ("remote", "again"))
    assert scheduler.reserve(remote)
    assert scheduler.num_prefix_blocks(again) == 0
    assert step(scheduler) == [] and scheduler.is_blocked
    scheduler.admit(remote)
    assert not scheduler.is_blocked
    assert scheduler.num_prefix_blocks(again) == 2


def test_a_prompt_of_which_all_log_probabilities_are_wanted_takes_no_cached_block(
    fake: SimpleNamespace,
) -> None:
    scheduler = make_scheduler()
    scheduler.add(fake.make_seq("first", prompt(9)))
    step(scheduler)
    sampling = SamplingParams(logprobs=0, prompt_logprobs=True)
    scored = Sequence("scored", prompt(9), 9, sampling, StopConditions(max_tokens=1))
    assert scheduler.num_prefix_blocks(scored) == 0


def test_nothing_is_hashed_without_a_prefix_cache(fake: SimpleNamespace) -> None:
    scheduler = make_scheduler(enable_prefix_cache=False)
    seq = fake.make_seq("r", prompt(9))
    scheduler.add(seq)
    step(scheduler)
    assert seq.block_hashes == [] and seq.num_published_blocks == 2


def test_different_salts_share_nothing(fake: SimpleNamespace) -> None:
    scheduler = make_scheduler()
    scheduler.add(fake.make_seq("mine", prompt(9), cache_salt="me"))
    step(scheduler)
    yours = fake.make_seq("yours", prompt(9), cache_salt="you")
    assert scheduler.num_prefix_blocks(yours) == 0
    mine = fake.make_seq("mine too", prompt(9), cache_salt="me")
    assert scheduler.num_prefix_blocks(mine) == 2


def test_the_youngest_gives_way_when_blocks_run_out_and_comes_back_first(
    fake: SimpleNamespace,
) -> None:
    scheduler = make_scheduler(num_blocks=4)
    for name, first in (("old", 100), ("young", 200)):
        scheduler.add(fake.make_seq(name, prompt(4, first), 50))
        step(scheduler)
    step(scheduler)
    scheduler.add(fake.make_seq("late", prompt(1), 50))
    while scheduler.num_preemptions == 0:
        step(scheduler)
    assert scheduler.num_preemptions == 1
    assert list(scheduler.running) == ["old"]
    assert list(scheduler.waiting) == ["young", "late"]
    young = scheduler.waiting["young"]
    num_tokens = young.num_tokens
    assert young.block_table == [] and num_tokens > 4  # what it generated is kept
    scheduler.finish(scheduler.running["old"])
    ((_, start, end), *_) = step(scheduler)
    assert end == num_tokens
    assert start % BLOCK_SIZE == 0


def test_a_prefill_only_sequence_is_never_preempted_and_holds_its_blocks_when_done(
    fake: SimpleNamespace,
) -> None:
    scheduler = make_scheduler(num_blocks=7, prefill_chunk_tokens=1)
    decoding = fake.make_seq("decoding", prompt(4), 50)
    scheduler.add(decoding)
    step(scheduler)
    exporting = fake.make_seq("exporting", prompt(16, 200), prefill_only=True)
    scheduler.add(exporting)
    step(scheduler)
    table = list(exporting.block_table)
    assert len(table) == 4
    while "decoding" in scheduler.running:
        assert exporting.num_computed_tokens < 16
        step(scheduler)
    scheduler.finish(exporting)
    scheduler.check_invariants()
    assert exporting.block_table == table
    scheduler.drop(exporting)
    scheduler.check_invariants()
    assert scheduler.pool.num_held == 0
    assert step(scheduler)[0][0] == "decoding"


def test_reservations_leave_blocks_for_the_running_and_for_the_head_of_the_queue(
    fake: SimpleNamespace,
) -> None:
    scheduler = make_scheduler(num_blocks=10)
    assert not scheduler.reserve(fake.make_seq("all", prompt(40)))
    assert scheduler.reserve(fake.make_seq("most", prompt(24)))
    scheduler.add(fake.make_seq("big", prompt(24, 500)))
    assert step(scheduler) == []
    assert scheduler.is_blocked
    assert not scheduler.reserve(fake.make_seq("sneaky", prompt(4, 900)))
    most = scheduler.remote["most"]
    scheduler.drop(most, quarantined=True)
    assert scheduler.pool.num_quarantined == 6
    assert step(scheduler) == []
    scheduler.release_quarantined(list(range(6)))
    assert not scheduler.is_blocked
    assert step(scheduler) == [("big", 0, 24)]
    assert not scheduler.reserve(fake.make_seq("larger", prompt(16, 900)))
    assert scheduler.reserve(fake.make_seq("next", prompt(12, 900)))


def test_a_blocked_queue_is_not_tried_again_until_blocks_come_back(fake: SimpleNamespace) -> None:
    scheduler = make_scheduler(num_blocks=8)
    scheduler.add(fake.make_seq("first", prompt(20), 50))
    step(scheduler)
    scheduler.add(fake.make_seq("second", prompt(20, 500), 50))
    step(scheduler)
    num_returns = scheduler.pool.num_returns
    step(scheduler)
    step(scheduler)
    assert scheduler.pool.num_returns == num_returns  # no references were taken and dropped
    scheduler.finish(scheduler.running["first"])
    assert step(scheduler) == [("second", 0, 20)]


@pytest.mark.parametrize("is_dropped", [False, True])
def test_blocks_are_kept_for_the_head_of_the_queue_until_it_is_gone(
    fake: SimpleNamespace, is_dropped: bool
) -> None:
    scheduler = make_scheduler(num_blocks=10)
    assert scheduler.reserve(fake.make_seq("most", prompt(24)))
    head = fake.make_seq("head", prompt(24, 500), prefill_only=True)
    scheduler.add(head)
    assert step(scheduler) == []
    assert not scheduler.reserve(fake.make_seq("early", prompt(12, 900)))
    if is_dropped:
        scheduler.drop(head)
    else:
        scheduler.finish(head)
        assert not scheduler.exported  # it has no blocks
    assert scheduler.reserve(fake.make_seq("late", prompt(12, 900)))  # of four blocks one is left


@pytest.mark.parametrize("windows", [(0,), (0, 6)])
def test_a_sequence_alone_takes_the_last_block(
    fake: SimpleNamespace, windows: tuple[int, ...]
) -> None:
    scheduler = make_scheduler(4 * len(windows), windows)
    scheduler.add(fake.make_seq("alone", prompt(16)))
    assert step(scheduler) == [("alone", 0, 16)]


def test_a_prompt_whose_next_chunk_gets_no_block_is_left_out(fake: SimpleNamespace) -> None:
    scheduler = make_scheduler(26, (0, 6), prefill_chunk_tokens=8)
    scheduler.add(fake.make_seq("old", prompt(3), 50))
    step(scheduler)
    scheduler.add(fake.make_seq("new", prompt(20, 500)))
    assert step(scheduler) == [("old", 3, 4), ("new", 0, 8)]
    scheduler.num_watermark_blocks = 26  # more than are left
    assert step(scheduler) == [("old", 4, 5)]


def test_a_reservation_leaves_the_blocks_that_a_prompt_under_way_will_take(
    fake: SimpleNamespace,
) -> None:
    scheduler = make_scheduler(16, (0, 6), max_num_batched_tokens=28)
    scheduler.add(fake.make_seq("prompt", prompt(30)))
    assert step(scheduler) == [("prompt", 0, 28)]
    # Of 7 + 2 blocks held, 8 + 5 needed at most; one more is left for answers to grow into.
    assert scheduler.pool.num_available == 7
    assert not scheduler.reserve(fake.make_seq("four blocks", prompt(8, 500)))
    assert scheduler.reserve(fake.make_seq("two blocks", prompt(4, 500)))
    assert step(scheduler) == [("prompt", 28, 30)]
    assert scheduler.reserve(fake.make_seq("two more", prompt(4, 900)))


@pytest.mark.parametrize("quarantined", [False, True])
def test_a_requeued_reservation_goes_to_the_head_of_the_queue_without_blocks(
    fake: SimpleNamespace, quarantined: bool
) -> None:
    scheduler = make_scheduler()
    remote = fake.make_seq("remote", prompt(9))
    assert scheduler.reserve(remote)
    assert remote.status is SequenceStatus.WAITING_FOR_REMOTE_KVS
    assert step(scheduler) == [] and scheduler.is_blocked
    scheduler.requeue(remote, quarantined=quarantined)
    assert not scheduler.is_blocked
    scheduler.add(fake.make_seq("local", prompt(9, 500)))
    scheduler.check_invariants()
    assert scheduler.pool.num_quarantined == (3 if quarantined else 0)
    assert step(scheduler) == [("remote", 0, 9), ("local", 0, 9)]


def test_only_the_blocks_that_a_reservation_fills_are_quarantined(fake: SimpleNamespace) -> None:
    scheduler = make_scheduler()
    first = fake.make_seq("first", prompt(9))
    scheduler.add(first)
    step(scheduler)
    remote = fake.make_seq("remote", prompt(16))
    assert scheduler.reserve(remote)
    filled = remote.block_table[2:]
    assert remote.block_table[:2] == first.block_table[:2]
    scheduler.drop(remote, quarantined=True)
    scheduler.check_invariants()
    assert scheduler.pool.num_quarantined == len(filled) == 2


def test_nothing_is_reserved_while_much_of_the_pool_is_quarantined(fake: SimpleNamespace) -> None:
    scheduler = make_scheduler(num_blocks=40)
    for name, size in (("first", 40), ("second", 4)):  # a quarter of the pool, then one block more
        assert scheduler.reserve(fake.make_seq(name, prompt(size)))
        scheduler.drop(scheduler.remote[name], quarantined=True)
    assert not scheduler.reserve(fake.make_seq("third", prompt(4)))
    scheduler.release_quarantined([0])
    assert scheduler.reserve(fake.make_seq("fourth", prompt(4)))
