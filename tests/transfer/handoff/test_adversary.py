"""Both sides of the handoff in schedules of an adversary; and what these find without each guard.

`handoff_schedules.py` beside this runs any number of them, and shows one that fails.
"""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tandem.transfer.handoff.decode import HandoffState
from tests.transfer.schedules.builds import Guard, build_without
from tests.transfer.schedules.explore import first_failure
from tests.transfer.schedules.guards import COVERED, GUARDS
from tests.transfer.schedules.memory import LoopbackMemory
from tests.transfer.schedules.steps import WIDTHS, Schedule

SCHEDULES_PER_PART = 4_000
ENOUGH = 20_000  # schedules without a guard; most fail within a few hundred
NUM_IN_MEMORY = 150
NUM_WATCHED = 1000
REASONS = (
    "deadline",
    "lease expired",
    "cancelled",
    "checksum",
    "was lost",
    "is gone",
    "link down",
    "its lease is over",
    "announced",
    "wrote",
)
DROPS = ("late", "stale", "bad secret", "duplicate", "conflict", "unknown span", "unclaimed")


@pytest.mark.parametrize("part", range(5))
def test_no_schedule_breaks_an_invariant(part: int) -> None:
    seeds = range(part * SCHEDULES_PER_PART, (part + 1) * SCHEDULES_PER_PART)
    assert first_failure(seeds) is None


def test_no_schedule_breaks_an_invariant_over_loopback_transports_in_real_memory() -> None:
    for seed in range(NUM_IN_MEMORY):
        Schedule(random.Random(seed), memory=LoopbackMemory()).run()


def test_the_schedules_go_every_way_that_a_handoff_can_go() -> None:
    ways: Counter[object] = Counter()
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
            ways.update(reason for reason in REASONS if reason in machine.close_reason)
            ways.update(machine.dropped)
    for way in (HandoffState.ADMITTED, HandoffState.CLOSED, "prefix", *REASONS, *DROPS):
        assert ways[way] >= 5, f"{way}: {ways}"
    for prefill_tp, decode_tp in WIDTHS:
        assert ways[prefill_tp, decode_tp, True] and ways[prefill_tp, decode_tp, False]


@settings(
    max_examples=40,
    derandomize=True,
    phases=(Phase.generate,),  # to shrink one takes minutes
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.randoms(use_true_random=False))
def test_no_schedule_that_hypothesis_draws_breaks_an_invariant(draw: random.Random) -> None:
    Schedule(draw, memory=LoopbackMemory()).run()


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_without_a_guard_a_schedule_fails(guard: Guard) -> None:
    assert first_failure(range(ENOUGH), build_without(guard)) is not None


@pytest.mark.parametrize("guard", COVERED, ids=lambda guard: guard.name)
def test_without_a_guard_that_others_cover_no_schedule_fails(guard: Guard) -> None:
    assert first_failure(range(500), build_without(guard)) is None
