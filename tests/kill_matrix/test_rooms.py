"""Nearly every change of a room's pure modules is noticed by the tests of the room."""

import subprocess
import sys

import pytest

from tandem.router.predict import PlaceLoad
from tandem.runtime.wire.cluster_messages import StepCosts
from tests.kill_matrix.matrix import ROOMS
from tests.kill_matrix.mutants import mutants

MOST = {"router": 40, "schedule": 40}  # mutants, where all take long
# Others behave like the original, mostly: they take longer, or move a bound that no computed number
# meets. In router and schedule there are more of these.
ENOUGH = {"admission": 0.95, "landed": 0.95, "router": 0.9, "schedule": 0.9}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("room", ROOMS)
def test_tests_notice_what_is_changed_in_their_room(room: str) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.kill_matrix.matrix",
        room,
        f"--most={MOST.get(room, 10_000)}",
    ]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    share = float(report.splitlines()[-1].partition("%")[0]) / 100
    assert share >= ENOUGH[room], report


def test_a_mutant_is_its_change_within_and_the_original_afterwards() -> None:
    all_of_it = mutants("tandem.router.predict")
    found = {each.kind: each for each in reversed(all_of_it) if each.function == "PlaceLoad.behind"}
    swap, drop = found["swap"], found["drop"]
    load = PlaceLoad(StepCosts((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), 1.0, 1, 1), num_waiting_tokens=5)
    with swap.applied():
        assert load.behind(2).num_waiting_tokens == 3
    assert "num_waiting_tokens - num_tokens" in swap.change
    with drop.applied():
        assert load.behind(2) is None
    assert load.behind(2).num_waiting_tokens == 7
