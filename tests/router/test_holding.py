"""The number of workers with answers, against the rules counted by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tandem.router.holding import (
    BUSY_SHARE,
    CHANGE_GAIN,
    FILLED_SHARE,
    LEAST_FREE,
    LEAST_FREE_OF_QUEUE,
    LEAST_SHARE,
    MAX_STEPS,
    PACKED_SHARE,
    PRESSING_SHARE,
    SURE_GAIN,
    num_holding,
)
from tandem.router.load import Rates, Shared
from tandem.router.predict import ANSWER_WEIGHT, share_left
from tandem.runtime.wire.cluster_messages import StepCosts
from tests.router.test_predict import LEARNED


def test_answers_with_a_target_stand_together_where_that_leaves_prompts_clearly_more_time() -> None:
    costs = StepCosts(
        *((6.4e-3, 5e-6, 4.9e-8), (8e-4, 3.1e-5, 1.5e-9), 0.02, 8192, 512, True),
        hidden_share=1.0,
    )
    four = Shared(
        4, 16, 16 * 6000.0
    )  # workers, answers and their context; steps of 8 ms with four, of 11 with all of them
    # spread over four workers they leave prompts 3.2 seconds a second, on one of them 3.6
    assert num_holding(costs, 4e5, 128, four, Rates(2.0, 2.04, 0.0)) == 1
    assert num_holding(costs, 4e5, 128, four, Rates(2.0, 2.2, 0.0)) == 4, (
        "elsewhere they are computed whole"
    )
    assert num_holding(costs, 4e5, 128, four, Rates(0.5, 0.5, 0.0)) == 4, (
        "prompts need too little of it"
    )


WORK = st.builds(
    lambda num_workers, num_answers, length, away, uncached, local: (
        Shared(num_workers, num_answers, float(num_answers * length)),
        Rates(away, away * uncached, local),
    ),
    st.integers(1, 8) | st.just(100),
    st.integers(0, 100),
    st.integers(0, 2000),
    st.floats(0.1, 8.0),
    st.floats(1.0, 1.5),
    st.floats(0.0, 2.0),
)


def decodes_s(costs: StepCosts, shared: Shared, num: int) -> float:
    """A step's, with the answers spread over so many workers."""
    if not shared.num_answers:
        return 0.0
    per_step_s, per_decode_s, per_context_s = costs.decode_s
    each = math.ceil(shared.num_answers / num)
    return per_step_s + each * per_decode_s + int(shared.context / num) * per_context_s


def have_room(shared: Shared, max_context: float, max_num_seqs: int, num: int) -> bool:
    by_rows = not max_num_seqs or shared.num_answers <= num * FILLED_SHARE * max_num_seqs
    return by_rows and shared.context <= num * FILLED_SHARE * max(max_context, 1.0)


@settings(max_examples=200, deadline=None)
@given(LEARNED, st.sampled_from([0.0, 1e4, 1e5]), st.sampled_from([0, 8, 64]), WORK)
def test_with_a_target_the_fewest_workers_hold_answers_that_have_time_room_and_rows_for_them(
    learned: StepCosts, max_context: float, max_num_seqs: int, work: tuple[Shared, Rates]
) -> None:
    shared, rates = work
    costs = replace(learned, has_target=True)
    num_workers = shared.num_workers
    left = share_left(costs, decodes_s(costs, shared, num_workers))
    constant_s = costs.decode_s[0]
    longest_s = PACKED_SHARE * costs.max_step_s
    variable_s = decodes_s(costs, shared, 1) - constant_s  # of all answers
    hold = (
        num
        for num in range(1, num_workers)
        if have_room(shared, max_context, max_num_seqs, num)
        and variable_s <= num * max(longest_s - constant_s, 1e-12)
    )
    num_held = next(hold, num_workers)
    packed_left = num_held * share_left(costs, decodes_s(costs, shared, num_held))
    uncached = rates.whole / rates.away
    is_more = num_workers - num_held + packed_left > uncached * SURE_GAIN * num_workers * left
    presses = rates.away / num_workers > PRESSING_SHARE * left
    found = num_holding(costs, max_context, max_num_seqs, *work)
    assert found == (num_held if presses and is_more else num_workers)


@settings(max_examples=200, deadline=None)
@given(
    LEARNED,
    st.sampled_from([0.0, 1e4, 1e5]),
    st.sampled_from([0, 8, 64]),
    WORK,
    st.integers(0, 8),
)
def test_without_a_target_so_many_hold_answers_that_the_fewest_answers_and_prompts_wait(
    learned: StepCosts,
    max_context: float,
    max_num_seqs: int,
    work: tuple[Shared, Rates],
    num_held: int,
) -> None:
    shared, rates = work
    costs = replace(learned, has_target=False)
    num_workers = shared.num_workers

    def queued(num: int, rate: float, busy: float) -> float:  # prompts, of M/M/c
        used = min(busy / num, 1.0) if num else 0.0
        free = max(1 - used, LEAST_FREE_OF_QUEUE)
        return rate * used ** (math.sqrt(2 * num + 2) - 1) / (num * free) if rate > 0 else 0.0

    def waiting(num: int) -> float:
        elsewhere = min(rates.away, BUSY_SHARE * (num_workers - num))
        here = rates.away - elsewhere
        busy = here + rates.local
        free = max(1 - busy / num, LEAST_FREE)
        spread_free = max(1 - (rates.away + rates.local) / num_workers, LEAST_FREE)
        slower = decodes_s(costs, shared, num) / free
        slower /= max(decodes_s(costs, shared, num_workers) / spread_free, 1e-12)
        prompts = queued(num, here, busy) + queued(num_workers - num, elsewhere, elsewhere)
        all_that_wait = ANSWER_WEIGHT * shared.num_answers * slower + prompts
        return all_that_wait * (1 if num == num_held else CHANGE_GAIN)

    step = max(1, num_workers // MAX_STEPS)
    nums = [
        num
        for num in range(num_workers, 0, -step)
        if num == num_workers or have_room(shared, max_context, max_num_seqs, num)
    ]
    found = num_holding(costs, max_context, max_num_seqs, *work, num_held)
    if not shared.num_answers or rates.away <= LEAST_SHARE * num_workers:
        assert found == num_workers
    else:
        assert found in nums
        assert waiting(found) == pytest.approx(min(map(waiting, nums)))


def test_without_a_target_answers_stand_together_beside_long_prompts_alone() -> None:
    """By the costs of an 8B model on an H100, with 32 answers of four workers."""
    costs = StepCosts((6.4e-3, 5e-6, 4.9e-8), (8e-4, 2.1e-5, 8.6e-10), 0.05, 8192, 2048)
    four = Shared(4, 32, 32 * 1000.0)

    def held(away: float, local: float = 0.0, num_held: int = 0) -> int:
        return num_holding(costs, 4e5, 128, four, Rates(away, away, local), num_held)

    assert held(0.15) == 4, "there are hardly any"
    assert held(0.4) == 3 and held(0.6) == 2
    assert held(2.4) == 1, "hardly anything but prompts"
    assert held(3.6, local=0.5) == 4, "the other workers have no time for them"
    assert held(0.4, local=1.5) == 4, "these are computed among the answers in any case"
    assert held(0.5, num_held=3) == 3 and held(0.5, num_held=2) == 2, "both are as good"
    crowded = Shared(4, 300, 3e5), Rates(1.5, 1.5, 0.0)
    assert num_holding(costs, 4e5, 128, *crowded) == 3, "two have 230 rows"
    assert num_holding(costs, 4e5, 0, *crowded) == 2
