"""A short nemesis: a minute of faults of every kind, and every answer is right."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.soak.checker import table
from tests.soak.nemesis import Plan, soak

SHORT = Plan(
    num_requests=100_000,  # the time ends it
    num_questions=50,
    time_limit_s=30.0,
    failover_limit_s=math.inf,  # other tests have the machine too
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "plan",
    [replace(SHORT, both=True), replace(SHORT, tp=4)],
    ids=["roles that change", "workers of four ranks, by two that share a head"],
)
async def test_no_answer_suffers_under_the_nemesis(tmp_path: Path, plan: Plan) -> None:
    verdict = await soak(plan, tmp_path)
    print("\n" + table(verdict))
    assert verdict.is_good, table(verdict)
    assert verdict.handoffs["admitted"] and verdict.flips.caught and verdict.faults
    assert bool(verdict.changes.get("done")) == plan.both
    assert any("a rank of" in name for name in verdict.faults) == (plan.tp > 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_nemesis_finds_what_an_unverified_flip_does(tmp_path: Path) -> None:
    """With the guard out, so that what it says with the guard in means something."""
    plan = Plan(
        num_requests=200,  # most flipped bits are too low to change a token
        num_questions=48,
        requests_per_s=40.0,
        flip_probability=1.0,
        is_blind=True,
        has_faults=False,
    )
    verdict = await soak(plan, tmp_path)
    assert verdict.counts.get("wrong tokens"), table(verdict)
    assert verdict.flips.missed and not verdict.flips.caught
