"""Timelines: whose marks stand, what a peer may add, and the intervals between them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.runtime.tracing.timeline import PREFILL_STAGES, Timeline, course, intervals_ms
from tests.runtime.tracing.timelines import aged

WHOLE = {
    "received": 0.0, "queued": 2.0, "claimed": 5.0, "first_write": 12.0, "computed": 20.0,
    "first_token": 21.0, "last_write": 24.0, "landed": 25.0, "verified": 25.5, "first_step": 30.0,
}  # fmt: skip


def test_the_first_mark_of_a_stage_stands() -> None:
    timeline = Timeline()
    timeline.mark("queued")
    first = timeline.ms()
    timeline.mark("queued")
    timeline.mark("first_token")
    assert list(timeline.ms()) == ["received", "queued", "first_token"]
    assert first.items() <= timeline.ms().items()
    assert timeline.ms()["received"] == 0.0


def test_a_mark_can_be_of_an_earlier_moment_but_none_before_the_request_came() -> None:
    timeline = aged({"landed": 500})
    timeline.mark("first_write", timeline.started_at - 10)
    assert timeline.ms()["landed"] == pytest.approx(500)
    assert timeline.ms()["first_write"] == 0.0


def test_a_peers_stages_count_from_our_own_mark_and_come_out_in_order_of_time() -> None:
    timeline = aged({"claimed": 100, "landed": 400})
    timeline.merge({"last_write": 290.0, "computed": 200.0, "first_write": 150.0}, "claimed")
    assert list(timeline.ms()) == [
        "received", "claimed", "first_write", "computed", "last_write", "landed",
    ]  # fmt: skip
    assert timeline.ms()["computed"] == pytest.approx(300)


def test_what_was_heard_twice_stands_as_it_was_heard_first() -> None:
    timeline = aged({"claimed": 0})
    timeline.merge({"computed": 100.0}, "claimed")
    timeline.merge({"computed": 200.0, "last_write": 300.0}, "claimed")
    stages = timeline.ms()
    assert (stages["computed"], stages["last_write"]) == pytest.approx((100, 300))


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, -math.inf, 1e4, 1e300])
def test_a_time_that_cannot_be_is_refused(value: float) -> None:
    timeline = aged({"claimed": 500})
    timeline.merge({"computed": value}, "claimed")
    assert "computed" not in timeline.ms()


def test_a_peer_can_neither_mark_our_stages_nor_invent_its_own() -> None:
    timeline = aged({"claimed": 0})
    timeline.merge(
        {"verified": 1.0, "first_token": 1.0, "received": 5.0, "x" * 999: 1.0}, "claimed"
    )
    assert list(timeline.ms()) == ["received", "claimed"]


def test_stages_of_a_peer_whose_claim_is_not_known_are_dropped() -> None:
    timeline = aged()
    timeline.merge({"computed": 1.0}, "claimed")
    assert list(timeline.ms()) == ["received"]


@given(st.dictionaries(st.one_of(st.sampled_from(PREFILL_STAGES), st.text()), st.floats()))
def test_whatever_a_peer_says_a_timeline_stays_small_and_in_the_past(
    said: dict[str, float],
) -> None:
    timeline = aged(seconds=0.01)
    timeline.mark("claimed")
    timeline.merge(said, "claimed")
    assert len(timeline.ms()) <= 2 + len(PREFILL_STAGES)
    assert all(0 <= ms <= timeline.elapsed_s() * 1e3 + 51 for ms in timeline.ms().values())


def test_a_prefill_worker_tells_its_stages_from_its_claim_on() -> None:
    assert aged().since("claimed") == {}
    timeline = aged({"claimed": 200, "computed": 500})
    assert timeline.since("claimed") == {"computed": pytest.approx(300)}


def test_the_intervals_of_a_handoff_lie_between_its_stages() -> None:
    assert course(WHOLE) == "remote"
    assert intervals_ms(WHOLE) == {
        "placement": 2.0, "queue": 3.0, "compute": 15.0, "answer": 1.0, "exposed_transfer": 5.0,
        "verification": 0.5, "first_step": 4.5,
    }  # fmt: skip
    pulled = intervals_ms(WHOLE | {"prefix_pulled": 7.0})
    assert (pulled["prefix_pull"], pulled["compute"]) == (2.0, 13.0)


def test_stages_of_two_hosts_that_cross_are_no_negative_interval() -> None:
    assert intervals_ms(WHOLE | {"claimed": 1.5})["queue"] == 0.0


def test_a_prompt_that_was_never_offered_has_its_own_intervals() -> None:
    stages = {"received": 0.0, "first_token": 8.0, "first_step": 11.0}
    assert course(stages) == "local"
    assert intervals_ms(stages) == {"prefill": 8.0, "second_token": 3.0}
    assert intervals_ms({}) == {}


def test_a_prompt_that_was_taken_back_has_no_intervals() -> None:
    stages = {stage: ms for stage, ms in WHOLE.items() if stage != "verified"}
    assert course(stages) == "fallback"
    assert intervals_ms(stages) == {}
