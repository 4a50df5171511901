"""Both sides of the handoff in schedules of an adversary.

`python -m tests.transfer.schedules.explore` runs any number of them, and shows one that fails.
"""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tandem.transfer.handoff.causes import CloseCause, DropCause
from tandem.transfer.handoff.decode import HandoffState
from tests.transfer.schedules.explore import first_failure
from tests.transfer.schedules.steps import WIDTHS, Schedule

NUM_WATCHED = 1_000
RARE = frozenset({CloseCause.QUEUE_LOST, CloseCause.TAKEN_BACK, CloseCause.INCOMPLETE})
RARELY_DROPPED = frozenset({DropCause.UNKNOWN_ORDINAL})


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [range(start, start + 4_000) for start in range(NUM_WATCHED, 20_000, 4_000)],
    ids=str,
)
def test_no_schedule_breaks_an_invariant(seeds: range) -> None:
    assert first_failure(seeds) is None


def test_schedules_go_every_way_that_a_handoff_can_go_and_break_no_invariant() -> None:
    ways: Counter[object] = Counter()
    causes: Counter[CloseCause | None] = Counter()
    dropped: Counter[DropCause] = Counter()
    for seed in range(NUM_WATCHED):
        schedule = Schedule(random.Random(seed))
        schedule.run()
        shape = schedule.world.shape
        for case in schedule.world.cases:
            machine = case.machine
            ways[machine.state] += 1
            ways["prefix"] += case.num_cached > 0 and machine.state is HandoffState.ADMITTED
            if machine.state is HandoffState.ADMITTED:
                ways[shape.prefill_tp, shape.decode_tp, schedule.world.verify] += 1
            causes[machine.close_cause] += 1
            dropped += machine.dropped
    for way in (HandoffState.ADMITTED, HandoffState.CLOSED, "prefix"):
        assert ways[way] >= 5, f"{way}: {ways}"
    assert all(causes[cause] >= 5 for cause in CloseCause if cause not in RARE), causes
    assert all(dropped[cause] >= 5 for cause in DropCause if cause not in RARELY_DROPPED), dropped
    for prefill_tp, decode_tp, _ in WIDTHS:
        assert ways[prefill_tp, decode_tp, True] and ways[prefill_tp, decode_tp, False]


@settings(
    max_examples=20,
    derandomize=True,
    phases=(Phase.generate,),  # to shrink one takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.randoms(use_true_random=False))
def test_no_schedule_that_hypothesis_draws_breaks_an_invariant(draw: random.Random) -> None:
    Schedule(draw).run()
