"""Exclusion of prefill workers for corrupt KV."""

from tandem.transfer.peers import WINDOW_S, PeerHealth

BAD, GOOD = ("bad", "1"), ("good", "1")


def failed(health: PeerHealth, *times: float) -> list[bool]:
    return [health.failed(BAD, now) for now in times]


def test_the_last_of_several_failures_within_a_minute_excludes() -> None:
    health = PeerHealth(3, 60.0)
    assert failed(health, 0.0, 20.0, 40.0) == [False, False, True]
    assert health.is_excluded(BAD, 41.0) and not health.is_excluded(GOOD, 41.0)
    assert health.excluded(41.0) == ["bad"]


def test_failures_far_apart_do_not_add_up() -> None:
    health = PeerHealth(2, 60.0)
    assert failed(health, 0.0, WINDOW_S + 1, 2 * WINDOW_S + 2) == [False, False, False]


def test_an_exclusion_ends_and_then_counts_anew() -> None:
    health = PeerHealth(2, 60.0)
    assert failed(health, 0.0, 1.0) == [False, True]
    assert not health.is_excluded(BAD, 61.5) and health.excluded(61.5) == []
    assert failed(health, 62.0, 63.0) == [False, True]


def test_failures_of_handoffs_that_were_under_way_do_not_prolong_an_exclusion() -> None:
    health = PeerHealth(1, 60.0)
    assert failed(health, 0.0, 1.0) == [True, False]
    assert not health.is_excluded(BAD, 60.5)


def test_a_restarted_worker_starts_afresh() -> None:
    health = PeerHealth(1, 60.0)
    health.failed(BAD, 0.0)
    assert not health.is_excluded(("bad", "2"), 1.0)
