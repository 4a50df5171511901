"""Fitted profiles: known costs come back, disturbed steps do not count, an engine gets one."""

import random
from pathlib import Path

import pytest

from tandem.bench.engine.fitted import Observed, errors_of, fit, main
from tandem.emulation.profile import Profile, load_profile
from tandem.engine.schedule.step_cost import StepWork
from tandem.models.paths import BUNDLED_MODEL

H100 = load_profile("h100/llama-3.1-8b")


def steps_of(profile: Profile, *, noise: float, num_disturbed: int = 0) -> list[Observed]:
    rng = random.Random(3)
    steps = []
    for index in range(400):
        num_decodes = rng.choice((0, 1, 4, 16, 64))
        work = StepWork(num_decodes, num_decodes * rng.choice((16, 500, 2000)))
        if not num_decodes or rng.random() < 0.5:
            work.add_prompt(rng.choice((0, 512)), rng.choice((16, 64, 256, 1024, 2048)))
        num_rows = num_decodes + 1
        seconds = profile.step_seconds(work, num_rows, num_decodes)
        seconds *= rng.uniform(1 - noise, 1 + noise) * (10 if index < num_disturbed else 1)
        steps.append(Observed(work, num_rows, seconds))
    return steps


@pytest.mark.parametrize("is_additive", [False, True])
def test_known_costs_come_back_by_their_own_step_model(is_additive: bool) -> None:
    known = H100.model_copy(update={"is_additive": is_additive})
    steps = steps_of(known, noise=0.0)
    found = fit(steps, H100.model_copy(update={"token_s": 1.0, "is_additive": not is_additive}))
    assert found.is_additive == is_additive
    assert found.token_s == pytest.approx(known.token_s, rel=0.01)
    assert max(errors_of(found, steps)) < 0.01


def test_steps_that_were_disturbed_do_not_count() -> None:
    steps = steps_of(H100, noise=0.02, num_disturbed=60)
    found = fit(steps, H100)
    assert found.token_s == pytest.approx(H100.token_s, rel=0.05)
    assert max(errors_of(found, steps[60:])) < 0.06


def test_the_engine_of_this_machine_gets_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    flags = ["--device=cpu", "--threads=1", "--seconds=1", "--longest=64", f"--output={path}"]
    assert main([str(BUNDLED_MODEL), *flags]) == 0
    found = load_profile(str(path))
    assert found.device_kind == "cpu" and found.tile_tokens == 1
    assert found.kv_bytes_per_token > 0 and found.token_s > 0


def test_a_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    assert main([str(tmp_path), "--device=cpu"]) == 1
