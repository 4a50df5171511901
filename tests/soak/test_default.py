"""The default topology under load and strikes keeps its promises, and its oracle sees others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.soak.default import FRONTEND, Plan, Verdict, judge_answers, judge_logs, soak
from tests.soak.mixed_load import Answer, Case, cases
from tests.soak.served_cluster import HONEST, LIMITED, Strike

CASE = Case("chat", "/v1/chat/completions", {})
RIGHT = Answer(CASE, HONEST, 50.0, 51.0, 200, "abc", "stop", has_ended=True)
REFUSED = {"status": 429, "text": "", "error": "limit"}
BUSY = {"status": 503, "text": "", "error": "busy"}


@pytest.mark.parametrize(
    ("changes", "victim", "verdict"),
    [
        ({}, "", "right"),
        ({"text": "abd"}, "", "wrong"),
        ({"text": "ab"}, "", "wrong"),
        ({"end": "length"}, "", "wrong"),
        ({"score": 0.1}, "", "wrong"),
        ({"text": "ab", "end": "", "has_left": True}, "", "left by the client"),
        ({"text": "b", "end": "", "has_left": True}, "", "wrong"),
        (BUSY, "first/worker-0", "error"),
        (BUSY, FRONTEND, "ended with the frontend"),
        ({"text": "x", "error": "broken off"}, FRONTEND, "error"),
        (BUSY | {"status": 404}, FRONTEND, "error"),
        (REFUSED | {"key": LIMITED}, "", "refused: over the key's limit"),
        (REFUSED, "", "error"),
    ],
)
def test_an_answer_is_judged_by_the_undisturbed_one_and_by_the_strikes_beside_it(
    changes: dict[str, Any], victim: str, verdict: str
) -> None:
    found = Verdict(strikes=[Strike("kill", (victim,), 49.0, 52.0)] if victim else [])
    judge_answers(found, [replace(RIGHT, **changes)], {CASE: RIGHT}, calm_at=0.0)
    assert dict(found.answers) == {verdict: 1}
    assert bool(found.violations) == (verdict in ("wrong", "error"))


@pytest.mark.parametrize(
    ("line", "num_violations"),
    [
        ("2026-11-27T02:32:00.000Z INFO    worker tandem.x: fine", 0),
        ("2026-11-27T02:32:00.000Z WARNING worker tandem.x: odd", 1),
        ("  Traceback (most recent call last):", 1),
    ],
)
def test_a_line_above_info_that_nothing_caused_is_a_violation(
    line: str, num_violations: int, tmp_path: Path
) -> None:
    (tmp_path / "worker-0.log").write_text(line + "\n")
    found = Verdict()
    judge_logs(found, [tmp_path])
    assert len(found.violations) == num_violations


def test_every_api_and_both_models_are_asked() -> None:
    asked = cases(1, "tiny", "sensitive")
    assert {each.path for each in asked} == {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    }
    assert {each.body["model"] for each in asked} == {"tiny", "sensitive"}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_default_topology_keeps_its_promises_whatever_is_struck(tmp_path: Path) -> None:
    verdict = await soak(Plan(), tmp_path)
    print(f"\n{verdict}")
    assert not verdict.violations, str(verdict)
    assert verdict.strikes and verdict.answers["right"] and verdict.answers["left by the client"]
