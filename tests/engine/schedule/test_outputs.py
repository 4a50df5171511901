"""The load that an engine tells."""

from types import SimpleNamespace

import msgspec
import pytest

from tandem.engine.config import EngineConfig
from tandem.engine.schedule.block_pool import BlockPool
from tandem.engine.schedule.outputs import LoadStats, load_of
from tandem.engine.schedule.scheduler import Scheduler
from tandem.engine.schedule.step_cost import StepCost


@pytest.mark.parametrize(("of_another", "num_own"), [("", 24), ("prompt", 11), ("next", 13)])
def test_a_load_counts_decodes_and_tokens_that_wait(
    fake: SimpleNamespace, of_another: str, num_own: int
) -> None:
    config = EngineConfig(block_size=4, max_num_batched_tokens=10)
    scheduler = Scheduler(config, BlockPool(64, 4), StepCost(max_step_s=3600))
    for name, num_tokens in (("answer", 3), ("prompt", 20), ("next", 11)):
        is_others = name == of_another
        scheduler.add(fake.make_seq(name, list(range(num_tokens)), prefill_only=is_others))
    chunks = scheduler.schedule()
    assert chunks is not None and [chunk.end for chunk in chunks] == [3, 7]
    scheduler.launched(chunks)
    scheduler.collected(chunks)
    scheduler.running["answer"].token_ids[3:] = [7]
    load = load_of(scheduler)
    assert (load.num_running, load.num_waiting, load.num_remote) == (2, 1, 0)
    # the token that was drawn last is computed by the next step
    assert (load.num_decodes, load.decode_context) == (1, 4)
    assert (load.num_running_prompt_tokens, load.num_waiting_prompt_tokens) == (13, 11)
    assert load.num_waiting_tokens == 1 + 13 + 11
    assert load.num_own_prompt_tokens == num_own
    assert load.waiting_context == pytest.approx(sum(range(7, 20)) + sum(range(11)), rel=0.1)
    assert load.costs is None, "no prompt was measured"
    scheduler.step_cost.observe(chunks, 0.05)
    costs = load_of(scheduler).costs
    assert costs is not None and costs.max_step_s == 3600 and max(costs.prompt_s) > 0
    assert (costs.max_tokens, costs.max_tokens_beside) == (10, 10)


def test_a_report_counts_blocks_as_of_sequences_without_windows() -> None:
    load = LoadStats(
        num_waiting_tokens=9, num_running=4, num_waiting=3, num_remote=2, num_blocks=90,
        num_free_blocks=30, num_cached_blocks=12, num_quarantined_blocks=0, num_preemptions=0,
        num_groups=3, max_num_seqs=8,
    )  # fmt: skip
    report = load.report("w", "e", "both")
    assert (report.num_running, report.num_waiting, report.max_num_seqs) == (4, 5, 8)
    assert (report.num_blocks, report.num_free_blocks, report.num_cached_blocks) == (30, 10, 4)
    alone = msgspec.structs.replace(load, num_groups=1).report("w", "e", "both")
    assert (alone.num_blocks, alone.num_waiting_tokens) == (90, 9)
