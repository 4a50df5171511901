"""Strangers attack everything that they reach, and honest streams are as they are without them."""

from pathlib import Path

import pytest

from tests.soak.hostile import soak
from tests.soak.hostile_plan import PLAN


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_no_attack_hurts_anyone_else(tmp_path: Path) -> None:
    verdict = await soak(PLAN, tmp_path)
    print(f"\n{verdict}")
    assert not verdict.violations, str(verdict)
    assert set(verdict.accounts) == {attack.__name__ for attack in PLAN.attacks}
    assert all(account.runs for account in verdict.accounts.values())
