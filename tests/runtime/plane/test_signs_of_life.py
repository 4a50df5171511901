"""The judgment on a peer's silence, by times alone."""

import pytest

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.plane.framing import Heartbeat
from tandem.runtime.plane.liveness import Liveness

CONFIG = RuntimeConfig(heartbeat_interval_s=0.5, heartbeat_misses=3, stall_timeout_s=30.0)
TICKS_PER_S = 10  # as the tick of this config


def first_fault(liveness: Liveness, start_s: float, end_s: float) -> tuple[float, str]:
    """The time of the first tick with a fault, and the fault; the end and nothing without one."""
    for tick in range(round(start_s * TICKS_PER_S), round(end_s * TICKS_PER_S) + 1):
        now = tick / TICKS_PER_S
        if fault := liveness.fault(now):
            return now, fault
    return end_s, ""


def test_a_silent_peer_is_in_doubt_after_two_intervals_and_given_up_after_almost_four() -> None:
    liveness = Liveness(CONFIG, 0.0)
    assert not liveness.is_quiet(1.0) and liveness.is_quiet(1.1)
    assert first_fault(liveness, 0.0, 5.0) == (1.9, "has been silent for 1.9 s")
    assert first_fault(Liveness(RuntimeConfig(), 0.0), 0.0, 5.0)[0] < 3.0
    liveness.heard(2.0)
    assert not liveness.is_quiet(2.5)
    assert first_fault(liveness, 2.0, 3.8) == (3.8, "")


@pytest.mark.parametrize("stood_still_s", [0.7, 3.0, 3600.0])
def test_a_process_that_stood_still_gives_its_peers_time_to_be_heard(stood_still_s: float) -> None:
    liveness = Liveness(CONFIG, 0.0)
    first_fault(liveness, 0.0, 1.0)  # the peer has been silent for a second
    again_s = 1.0 + stood_still_s
    given_up_s, fault = first_fault(liveness, again_s, again_s + 5)
    assert "silent" in fault
    assert given_up_s - again_s >= 0.8


def test_standing_still_is_no_lack_of_progress_of_the_peer() -> None:
    liveness = Liveness(CONFIG, 0.0)
    liveness.progressed(Heartbeat(7, True), 0.0)
    assert liveness.fault(0.0) == ""
    assert liveness.fault(100.0) == ""  # 99.9 s of the hundred do not count
    faults: list[tuple[float, str]] = []
    for tick in range(1, 320):
        now = 100.0 + tick / TICKS_PER_S
        liveness.heard(now)
        if fault := liveness.fault(now):
            faults.append((now, fault))
    assert 129.9 < faults[0][0] < 130.3 and "busy without progress" in faults[0][1]


def test_a_peer_without_work_needs_no_progress() -> None:
    liveness = Liveness(CONFIG, 0.0)
    liveness.progressed(Heartbeat(7, True), 0.0)
    for tick in range(1, 100 * TICKS_PER_S):
        liveness.heard(tick / TICKS_PER_S)
        liveness.progressed(Heartbeat(7, False), tick / TICKS_PER_S)
        assert not liveness.fault(tick / TICKS_PER_S)


def test_a_peer_that_does_not_read_has_the_time_of_a_stall_without_our_own_pauses() -> None:
    liveness = Liveness(CONFIG, 0.0)
    liveness.unread(0.0)
    assert first_fault(liveness, 0.0, 20.0) == (20.0, "")
    given_up_s, fault = first_fault(liveness, 60.0, 90.0)
    assert 69.8 < given_up_s < 70.3 and fault == "does not read"
    liveness.read_again()
    assert first_fault(liveness, given_up_s, given_up_s + 1.5) == (given_up_s + 1.5, "")
