"""Each wait, record and pinned copy of the program is missed, by name, where it is taken out."""

from pathlib import Path

import pytest

from tests.stream_order import scenes
from tests.stream_order.gpu import Gpus
from tests.stream_order.mutants import MUTANTS, Mutant, Scene


async def play(
    scene: Scene, folder: Path, shallow: Path, mixture: scenes.ByTransformers, gpus: Gpus
) -> None:
    match scene:
        case "steps":
            scenes.steps(shallow, "cuda:0")
        case "masks":
            scenes.masks(shallow, "cuda:0")
        case "mixture":
            scenes.mixture(mixture, "cuda:0")
        case "handoff":
            await scenes.handoff(folder)
        case "quarantine":
            await scenes.quarantine(gpus, folder)
        case "failed_launch":
            await scenes.failed_launch(shallow)
        case "lost":
            scenes.lost(gpus, shallow)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
async def test_a_mutant_is_judged_by_name(
    mutant: Mutant, folder: Path, shallow: Path, mixture: scenes.ByTransformers, gpus: Gpus
) -> None:
    with mutant.applied():
        raised = ""
        try:
            await play(mutant.scene, folder, shallow, mixture, gpus)
        except Exception as error:
            raised = type(error).__name__
    assert mutant.verdict in {each.kind for each in gpus.order.verdicts} | {raised}, (
        gpus.order.verdicts,
        raised,
    )
