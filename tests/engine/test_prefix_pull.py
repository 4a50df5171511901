"""The head of a prompt whose K/V is pulled from elsewhere before the prompt is computed."""

from types import SimpleNamespace

import pytest

from tandem.engine.schedule.sequence import Sequence
from tandem.runtime.errors import ContextLengthError, InvalidRequestError
from tandem.runtime.wire.block_hash import block_hashes

GARBAGE = 666


def prompt(num_tokens: int, first: int = 100) -> list[int]:
    return list(range(first, first + num_tokens))


def exported(fake: SimpleNamespace, name: str, tokens: list[int]) -> Sequence:
    seq: Sequence = fake.make_seq(name, tokens, 1, prefill_only=True)
    return seq


def computed_spans(harness: SimpleNamespace, name: str) -> list[tuple[int, int]]:
    return [
        (start, end)
        for step in harness.runner.steps
        for request_id, start, end in step
        if request_id == name
    ]


def spoil(harness: SimpleNamespace, block_ids: list[int]) -> None:
    """A late or torn write."""
    for block_id in block_ids:
        for offset in range(harness.runner.block_size):
            harness.runner.slots[block_id * harness.runner.block_size + offset] = GARBAGE


def test_a_pulled_prefix_is_not_computed_again(fake: SimpleNamespace) -> None:
    harness = fake.make_harness()
    seq = exported(fake, "r", prompt(22))
    expected = fake.undisturbed(seq)
    fill = harness.engine.reserve_prefix(seq, 4)
    assert [ordinal for ordinal, _ in fill] == [0, 1, 2, 3]
    assert harness.engine.prefix_hit(seq) == 0  # nothing is proven yet
    harness.engine.check_invariants()
    harness.runner.land(seq.token_ids, fill)
    harness.engine.adopt_prefix("r", proven=True)
    harness.engine.check_invariants()
    harness.engine.add(seq)
    harness.run()
    assert harness.texts["r"] == expected
    assert harness.finished["r"].num_cached_tokens == 16
    assert computed_spans(harness, "r") == [(16, 22)]
    assert seq.block_table[:4] == [block_id for _, block_id in fill]
    harness.engine.abort("r")
    harness.assert_all_free()


def test_what_is_here_already_is_not_pulled_and_stays_until_the_pull_ends(
    fake: SimpleNamespace,
) -> None:
    harness = fake.make_harness(num_blocks=16)
    harness.engine.add(fake.make_seq("before", prompt(10), 1))
    harness.run()
    seq = exported(fake, "r", prompt(22))
    fill = harness.engine.reserve_prefix(seq, 5)
    assert [ordinal for ordinal, _ in fill] == [2, 3, 4]
    # Everything else is taken, and all that could be evicted is.
    harness.engine.add(fake.make_seq("large", prompt(36, 500), 8))
    harness.run()
    harness.engine.check_invariants()
    assert harness.engine.prefix_hit(seq) == 8
    harness.runner.land(seq.token_ids, fill)
    harness.engine.adopt_prefix("r", proven=True)
    assert harness.engine.prefix_hit(seq) == 20


def test_a_pull_goes_on_beside_the_blocks_that_are_here(fake: SimpleNamespace) -> None:
    harness = fake.make_harness()
    pool = harness.engine.block_pool
    hole = pool.allocate(4)
    cached = pool.allocate(2)
    seq = exported(fake, "r", prompt(25))
    pool.publish(cached, block_hashes(seq.token_ids[:8], 4))
    pool.free(hole)  # which fits better
    fill = harness.engine.reserve_prefix(seq, 6)
    assert [block_id for _, block_id in fill] == [cached[-1] + n for n in (1, 2, 3, 4)]


def test_an_unproven_prefix_is_computed(fake: SimpleNamespace) -> None:
    harness = fake.make_harness()
    seq = exported(fake, "r", prompt(22))
    expected = fake.undisturbed(seq)
    fill = harness.engine.reserve_prefix(seq, 4)
    spoil(harness, [block_id for _, block_id in fill])
    harness.engine.adopt_prefix("r", proven=False)
    harness.engine.check_invariants()
    harness.assert_all_free()
    assert harness.engine.prefix_hit(seq) == 0
    harness.engine.add(seq)
    harness.run()
    assert harness.texts["r"] == expected
    assert computed_spans(harness, "r") == [(0, 22)]


def test_the_end_of_a_pull_that_is_unknown_or_over_changes_nothing(fake: SimpleNamespace) -> None:
    harness = fake.make_harness()
    seq = exported(fake, "r", prompt(22))
    fill = harness.engine.reserve_prefix(seq, 4)
    harness.runner.land(seq.token_ids, fill)
    for proven in (True, True, False):
        harness.engine.adopt_prefix("r", proven=proven)
        harness.engine.adopt_prefix("nobody", proven=proven)
        harness.engine.check_invariants()
        assert harness.engine.prefix_hit(seq) == 16


def test_blocks_that_were_set_aside_are_held_until_the_end_of_their_new_name(
    fake: SimpleNamespace,
) -> None:
    harness = fake.make_harness()
    assert len(harness.engine.reserve_prefix(exported(fake, "r", prompt(22)), 4)) == 4
    harness.engine.set_aside_prefix("r", "r, late")
    harness.engine.set_aside_prefix("nobody", "nobody, late")
    harness.engine.adopt_prefix("r", proven=False)
    assert harness.engine.block_pool.num_held == 4
    harness.engine.adopt_prefix("r, late", proven=False)
    harness.assert_all_free()


def test_only_blocks_that_can_be_shared_are_pulled(fake: SimpleNamespace) -> None:
    harness = fake.make_harness()
    for length, num_shareable in ((1, 0), (4, 0), (5, 1), (16, 3), (17, 4)):
        seq = exported(fake, f"r{length}", prompt(length, 1000 * length))
        fill = harness.engine.reserve_prefix(seq, 99)
        assert fill is not None
        assert [ordinal for ordinal, _ in fill] == list(range(num_shareable))
    pulls = harness.engine.scheduler.pulls
    assert [i for i in (1, 4, 5, 16, 17) if f"r{i}" in pulls] == [5, 16, 17]


def test_nothing_is_held_when_all_of_the_prefix_is_here(fake: SimpleNamespace) -> None:
    harness = fake.make_harness()
    harness.engine.add(fake.make_seq("before", prompt(22), 1))
    harness.run()
    assert harness.engine.reserve_prefix(exported(fake, "r", prompt(22)), 5) == []
    harness.assert_all_free()
    harness.engine.check_invariants()


def test_there_is_no_pull_without_a_prefix_cache(fake: SimpleNamespace) -> None:
    harness = fake.make_harness(enable_prefix_cache=False)
    assert harness.engine.reserve_prefix(exported(fake, "r", prompt(22)), 5) is None


def test_a_pull_starves_neither_who_runs_nor_who_came_before(fake: SimpleNamespace) -> None:
    harness = fake.make_harness(num_blocks=10)
    harness.engine.add(fake.make_seq("running", prompt(18), 10))
    harness.step()
    assert harness.engine.reserve_prefix(exported(fake, "a", prompt(21, 300)), 5) is None
    harness.engine.add(fake.make_seq("waiting", prompt(30, 200), 5))
    harness.step()
    assert harness.engine.reserve_prefix(exported(fake, "b", prompt(9, 400)), 2) is None
    harness.engine.check_invariants()
    assert harness.engine.block_pool.num_held == 5


def test_who_waits_for_the_blocks_of_a_pull_starts_when_it_ends(fake: SimpleNamespace) -> None:
    harness = fake.make_harness(num_blocks=10)
    assert harness.engine.reserve_prefix(exported(fake, "r", prompt(33)), 8)
    local = fake.make_seq("local", prompt(18, 200), 4)
    expected = fake.undisturbed(local)
    harness.engine.add(local)
    harness.step()
    assert not harness.engine.has_work
    harness.engine.adopt_prefix("r", proven=False)
    harness.run()
    assert harness.texts["local"] == expected


def test_a_block_that_somebody_published_meanwhile_is_just_freed(fake: SimpleNamespace) -> None:
    harness = fake.make_harness()
    seq = exported(fake, "r", prompt(22))
    fill = harness.engine.reserve_prefix(seq, 4)
    harness.engine.add(fake.make_seq("faster", prompt(10), 1))
    harness.run()
    harness.runner.land(seq.token_ids, fill)
    harness.engine.adopt_prefix("r", proven=True)
    harness.engine.check_invariants()
    assert harness.engine.prefix_hit(seq) == 16
    assert harness.engine.block_pool.num_cached == 4
    harness.assert_all_free()


@pytest.mark.parametrize("quarantined", [False, True])
def test_an_abort_lets_go_of_a_pull_and_keeps_its_blocks_while_writes_may_land(
    fake: SimpleNamespace, quarantined: bool
) -> None:
    harness = fake.make_harness()
    harness.engine.add(fake.make_seq("before", prompt(10), 1))
    harness.run()
    fill = harness.engine.reserve_prefix(exported(fake, "r", prompt(22)), 5)
    assert harness.engine.abort("r", quarantined=quarantined)
    assert not harness.engine.abort("r")
    harness.engine.check_invariants()
    block_ids = [block_id for _, block_id in fill]
    assert harness.engine.block_pool.num_quarantined == (3 if quarantined else 0)
    if quarantined:
        table = harness.engine.block_pool.allocate(harness.engine.block_pool.num_available)
        assert not set(table) & set(block_ids)
        harness.engine.block_pool.free(table)
        harness.engine.release_quarantined(block_ids)
    harness.assert_all_free()


def test_a_prompt_pulls_once_and_only_before_it_is_added(fake: SimpleNamespace) -> None:
    harness = fake.make_harness()
    seq = exported(fake, "r", prompt(22))
    assert harness.engine.reserve_prefix(seq, 5)
    with pytest.raises(InvalidRequestError, match="r is pulling its prefix already"):
        harness.engine.reserve_prefix(seq, 5)
    harness.engine.adopt_prefix("r", proven=False)
    harness.engine.add(seq)
    with pytest.raises(InvalidRequestError, match="in the engine already"):
        harness.engine.reserve_prefix(seq, 5)
    with pytest.raises(ContextLengthError):
        harness.engine.reserve_prefix(exported(fake, "long", prompt(300)), 5)
