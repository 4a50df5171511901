"""Strangers attack everything that they reach, and honest streams are as they are without them."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.soak.hostile import Verdict, judge_answers, soak
from tests.soak.hostile_plan import PLAN
from tests.soak.strangers import Account
from tests.soak.test_checker import RIGHT


def test_the_verdict_has_the_largest_gap_beside_each_attack() -> None:
    runs = {"early": [(10.0, 10.4)], "often": [(10.1, 10.3), (10.8, 11.0)], "never": [(20.0, 21.0)]}
    verdict = Verdict(accounts={name: Account(runs=each) for name, each in runs.items()})
    outcomes = [
        replace(RIGHT, largest_gap_s=0.2, gap_ended_at=10.3),
        replace(RIGHT, largest_gap_s=0.1, gap_ended_at=10.9),
        replace(RIGHT, largest_gap_s=0.05, gap_ended_at=10.2),
    ]
    judge_answers(verdict, outcomes, {0: RIGHT})
    assert verdict.gaps == {"early": 0.2, "often": 0.2}
    assert verdict.largest_gap == (0.2, "early, often") and not verdict.violations
    assert "gap 0.20 s" in str(verdict)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_no_attack_hurts_anyone_else(tmp_path: Path) -> None:
    verdict = await soak(PLAN, tmp_path)
    print(f"\n{verdict}")
    assert not verdict.violations, str(verdict)
    assert set(verdict.accounts) == {attack.__name__ for attack in PLAN.attacks}
    assert all(account.runs for account in verdict.accounts.values())
