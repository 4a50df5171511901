"""Costs that are known before the first request."""

from types import SimpleNamespace

import pytest

from tandem.engine.config import EngineConfig
from tandem.engine.core import first_costs
from tandem.engine.core.engine import Engine
from tandem.engine.core.first_costs import NUM_ANSWERS, measure_costs
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.sequence import Chunk
from tandem.engine.schedule.step_cost import work_of
from tandem.models.paths import BUNDLED_MODEL


@pytest.mark.parametrize(
    "limits",
    [{}, {"max_num_seqs": 1}, {"num_blocks": 4}, {"max_num_batched_tokens": 16}],
    ids=str,
)
def test_an_engine_knows_what_every_step_costs_and_keeps_nothing(
    limits: dict[str, int],
) -> None:
    config = EngineConfig(model=str(BUNDLED_MODEL), **limits)
    engine = Engine(config, ModelRunner(config))
    assert engine.load().costs is None
    measure_costs(engine)
    load = engine.load()
    assert load.costs is not None and any(load.costs.decode_s) and any(load.costs.prompt_s)
    assert load.num_free_blocks == load.num_blocks and load.num_running == load.num_waiting == 0
    assert not engine.has_work and engine.block_pool.enable_prefix_cache
    engine.check_invariants()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_share_that_a_step_of_both_hides_is_measured(
    fake: SimpleNamespace, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_costs, "BUDGET_S", 60.0)  # of the machine's time, which may be busy
    harness = fake.make_harness(num_blocks=2048)

    def seconds(chunks: list[Chunk]) -> float:
        work = work_of(chunks)
        decodes_s = 7e-3 + 3e-5 * work.num_decodes if work.num_decodes else 0.0
        prompts_s = 1e-3 + 4e-5 * work.num_prompt_tokens if work.num_prompt_tokens else 0.0
        return decodes_s + prompts_s - share * min(7e-3, prompts_s, decodes_s)

    harness.runner.seconds_of = seconds
    measure_costs(harness.engine)
    costs = harness.engine.load().costs
    assert costs is not None
    assert costs.hidden_share == pytest.approx(share, abs=0.1)
    assert costs.prompt_s[1] == pytest.approx(4e-5, rel=0.05)


def test_a_model_that_fails_is_left_to_the_first_request(
    fake: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    harness = fake.make_harness()
    names = (f"measured {wave}.{index}" for wave in (0, 1) for index in range(NUM_ANSWERS))
    harness.runner.poison |= set(names)
    measure_costs(harness.engine)
    assert harness.engine.load().costs is None
    assert "the costs of steps could not be measured" in caplog.text
