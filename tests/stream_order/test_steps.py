"""Workers on GPUs, judged by the order of their work."""

from pathlib import Path

import pytest

from tests.stream_order import scenes
from tests.stream_order.gpu import Gpus


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"cuda_graphs": False}, marks=pytest.mark.slow),
        pytest.param({"deterministic": True}, marks=pytest.mark.slow),
        pytest.param({"cascade_attention": True}, marks=pytest.mark.slow),
    ],
    ids=["graphs", "no graphs", "deterministic", "cascade attention"],
)
def test_steps_ahead_of_the_host_are_in_order(
    shallow: Path, gpus: Gpus, options: dict[str, bool]
) -> None:
    found = scenes.steps(shallow, "cuda:0", **options)
    assert gpus.order.verdicts == []
    assert found == scenes.steps(shallow, "cpu")


@pytest.mark.slow
def test_steps_without_a_late_mask_are_in_order(shallow: Path, gpus: Gpus) -> None:
    found = scenes.masks(shallow, "cuda:0")
    assert gpus.order.verdicts == []
    assert found == scenes.masks(shallow, "cpu")
    assert all(token % 2 == 0 for token in found["bound"])


@pytest.mark.slow
def test_steps_with_experts_are_in_order(mixture: scenes.ByTransformers, gpus: Gpus) -> None:
    found = scenes.mixture(mixture, "cuda:0")
    assert gpus.order.verdicts == []
    assert found == scenes.mixture(mixture, "cpu")


async def test_a_handoff_by_layers_is_in_order_at_both_ends(folder: Path, gpus: Gpus) -> None:
    found = await scenes.handoff(folder)
    assert gpus.order.verdicts == []
    engine = scenes.make_engine(folder, "cpu")
    seqs = scenes.sequence("moved", 11), scenes.sequence("other", 4)
    assert found == scenes.run(engine, *seqs)


@pytest.mark.slow
async def test_no_block_is_used_while_a_late_write_may_reach_it(folder: Path, gpus: Gpus) -> None:
    await scenes.quarantine(gpus, folder)
    assert gpus.order.verdicts == []


@pytest.mark.slow
async def test_nothing_of_a_failed_step_is_under_way(shallow: Path, gpus: Gpus) -> None:
    await scenes.failed_launch(shallow)
    assert gpus.order.verdicts == []


@pytest.mark.slow
def test_a_lost_gpu_is_told_from_a_failed_step(shallow: Path, gpus: Gpus) -> None:
    scenes.lost(gpus, shallow)
    assert gpus.order.verdicts == []
