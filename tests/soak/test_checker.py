"""The nemesis's judge recognizes each kind of broken promise."""

from dataclasses import replace

import pytest

from tandem.runtime.errors import InternalError, TandemError, UnavailableError
from tests.soak.checker import classify, failovers, is_excused, judge, percentile
from tests.soak.faults import Fault, Happened
from tests.soak.fleet import PREFILL
from tests.soak.load import Order, Outcome, Question

ORDER = Order(0, Question(0, (5, 6, 7), "greedy", 4), "salt", None)
RIGHT = Outcome(
    ORDER,
    started_at=10.0,
    finished_at=11.0,
    status=200,
    headers={"x-tandem-decode-instance": "d0", "x-tandem-request-id": "r"},
    text="abcd",
    num_tokens=4,
    finish_reason="length",
)
ERROR = {"num_tokens": None, "finish_reason": None, "error": "connection_lost: gone"}


def struck(kind: str, target: str, began_at: float, ended_at: float, cut: str = "") -> Happened:
    fault = Fault(kind, (target,), 1.0, 1.0, cut=cut)  # type: ignore[arg-type]
    return Happened(fault, began_at, ended_at, [target.replace("decode", "d")])


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "right"),
        ({"text": "abxd"}, "!wrong tokens"),
        ({"text": "abbcd"}, "!duplicated or missing tokens"),
        ({"text": "abd"}, "!duplicated or missing tokens"),
        ({"num_tokens": 5}, "!duplicated or missing tokens"),
        ({"finish_reason": "stop"}, "!duplicated or missing tokens"),
        ({"has_hung": True}, "!no outcome: hung"),
        ({"broken": "reset"}, "!no outcome: broken off"),
        ({"has_left": True, "text": "ab"}, "left by the client"),
        ({"has_left": True, "text": "ax"}, "!wrong tokens"),
        ({**ERROR, "text": "ab"}, "!error without a reason"),
        ({**ERROR, "text": "b"}, "!duplicated or missing tokens"),
    ],
)
def test_an_outcome_is_held_against_the_undisturbed_one(
    changes: dict[str, object], verdict: str
) -> None:
    assert classify(replace(RIGHT, **changes), RIGHT, excused=False) == verdict  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("happened", "excused"),
    [
        ([], False),
        ([struck("kill", "decode0", 10.5, 12.0)], True),
        ([struck("stop", "decode0", 9.0, 10.0)], True),
        ([struck("cut", "decode0", 10.5, 12.0, cut="front")], True),
        ([struck("cut", "decode0", 10.5, 12.0, cut="nats")], False),
        ([struck("restart", "decode0", 10.5, 12.0)], False),
        ([struck("kill", "decode1", 10.5, 12.0)], False),
        ([struck("kill", "steady0", 10.5, 12.0)], False),
        ([Happened(Fault("role", ("d0",), 0.0, 1.0, role="prefill"), 10.5, 10.9, ["d0"])], False),
        ([struck("kill", "decode0", 11.5, 12.0)], False),
        ([struck("kill", "decode0", 1.0, 2.0)], False),
        ([struck("kill", "prefill0", 10.5, 12.0)], False),
    ],
)
def test_a_broken_stream_is_excused_by_the_end_of_its_own_decode_worker_alone(
    happened: list[Happened], excused: bool
) -> None:
    assert is_excused(replace(RIGHT, **ERROR), happened) is excused  # type: ignore[arg-type]


def test_a_refused_request_is_excused_only_when_no_decode_worker_was_left() -> None:
    refused = replace(RIGHT, status=503, headers={}, **ERROR)  # type: ignore[arg-type]
    one, other = struck("kill", "decode0", 9.0, 12.0), struck("stop", "decode1", 10.0, 12.0)
    assert not is_excused(refused, [one])
    assert is_excused(refused, [one, other])


def test_a_failover_counts_from_the_end_of_the_worker_that_had_the_prompt() -> None:
    events = [{"event": "claimed", "at": 10.2, "request": "r", "prefill": "p0"}]
    death = Happened(Fault("stop", ("prefill0",), 1.0, 1.0), 10.4, 12.0, ["p0"])
    assert failovers([RIGHT], [death], events) == {"r": pytest.approx(0.6)}
    admitted = {"event": "admitted", "at": 10.3, "request": "r"}
    assert failovers([RIGHT], [death], [*events, admitted]) == {}
    other = Happened(Fault("stop", ("prefill1",), 1.0, 1.0), 10.4, 12.0, ["p1"])
    assert failovers([RIGHT], [other], events) == {}


def test_the_verdict_counts_flips_lost_blocks_and_slow_failovers() -> None:
    events = [
        {"event": "claimed", "at": 5.0, "request": "r", "prefill": "p0"},
        {"event": "flip", "at": 10.0},
        {"event": "flip", "at": 10.1},
        {"event": "missed", "at": 10.2},
        {"event": "caught", "at": 10.3},
        {"event": "counted", "at": 10.3},
    ]
    gone = Happened(Fault("kill", PREFILL, 1.0, 1.0), 6.0, 12.0, ["p0", "p1"])
    verdict = judge({0: RIGHT}, [RIGHT], [gone], events, {"d0": 3}, failover_limit_s=3.0)
    kinds = sorted(violation.kind for violation in verdict.violations)
    assert kinds == ["blocks lost", "missed flip", "slow failover"]
    assert (verdict.flips.injected, verdict.flips.caught, verdict.flips.missed) == (2, 1, 1)
    assert (verdict.num_while_all_prefill_dead, verdict.num_failed_then) == (1, 0)


def test_the_verdict_tells_what_came_of_changes_of_roles() -> None:
    def changed(began_at: float, ended_at: float, error: TandemError | None = None) -> Happened:
        fault = Fault("role", ("flexible0",), 0.0, 1.0, role="prefill")
        return Happened(fault, began_at, ended_at, error=error)

    happened = [
        changed(1.0, 1.5),
        changed(2.0, 5.0),  # while the worker was killed
        changed(20.0, 20.2),
        changed(21.0, 21.1, UnavailableError("another change")),
        changed(22.0, 22.1, InternalError("a bug")),
        struck("kill", "flexible0", 3.0, 6.0),
        struck("kill", "steady0", 0.0, 30.0),
    ]
    verdict = judge({0: RIGHT}, [RIGHT], happened, [], {}, failover_limit_s=3.0)
    assert verdict.changes == {"done": 3, "unavailable": 1, "internal": 1}
    assert verdict.changes_s == pytest.approx([0.2, 0.5])
    assert [violation.kind for violation in verdict.violations] == ["a change of roles failed"]


def test_percentiles_are_of_the_nearest_rank() -> None:
    values = [float(value) for value in range(1, 201)]
    assert [percentile(values, p) for p in (50, 99, 100)] == [100.0, 198.0, 200.0]
    assert percentile([7.0], 99) == 7.0
