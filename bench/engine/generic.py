"""Decode steps and prompts of one model on a CPU, by transformers' modules beside native code.

python -m tandem.bench.engine.generic
"""

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from tandem.bench.engine.rig import Rig
from tandem.bench.report.figures import Figure, at_most
from tandem.bench.report.options import option, parse
from tandem.bench.report.program import run_program
from tandem.bench.report.turns import compared
from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.ring import ModelImpl
from tandem.kernels.cpu.linear import pack_panels
from tandem.models.random_model import PRESETS, write_shape

MODULE = "tandem.bench.engine.generic"
PROMPT_TARGET, STEP_TARGET = at_most(1.15), at_most(1.10)
HOW = {"times": "CPU time on one core, in turns, of a prompt of 512 tokens and of a decode step"}
CONTEXT, PROMPT, NUM_BLOCKS = 128, 512, 512


@dataclass(frozen=True, slots=True)
class Options:
    """Time a random Qwen3 of 16 layers of 768 on one core, in turns."""

    dtype: str = option("bfloat16", "or float32")
    steps: int = option(200, "decode steps of each")
    prompts: int = option(8, "of 512 tokens, of each")
    output: Path | None = option(None, "write everything as JSON")


class _Panels:
    """Packs equal matrices once: where memory lies moves a product's time by more than 10 %."""

    def __init__(self) -> None:
        self._made: dict[bytes, torch.Tensor] = {}

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        numbers = weight.contiguous().view(torch.uint8).numpy().tobytes()
        key = hashlib.blake2b(numbers).digest()
        if key not in self._made:
            self._made[key] = pack_panels(weight)
        return self._made[key]


def rig(folder: Path, dtype: str, model_impl: ModelImpl) -> Rig:
    config = EngineConfig(
        model=str(folder),
        dtype=dtype,
        model_impl=model_impl,
        device="cpu",
        threads=1,
        num_blocks=NUM_BLOCKS,
        enable_prefix_cache=False,
    )
    return Rig(config, ModelRunner(config))


def measure(options: Options, folder: Path) -> Iterator[Figure]:
    """Yield the times of prompts and steps of a model written into `folder`."""
    write_shape(folder, replace(PRESETS["small"], dtype=options.dtype))
    with mock.patch("tandem.kernels.cpu.linear.pack_panels", _Panels()):
        rigs = {
            "native": rig(folder, options.dtype, "native"),
            "transformers": rig(folder, options.dtype, "transformers"),
        }
    prompts = {name: partial(run_prompt, each) for name, each in rigs.items()}
    yield from compared("prompt", prompts, options.prompts, PROMPT_TARGET)
    for each in rigs.values():
        each.place(1, CONTEXT)
    steps = {name: each.step for name, each in rigs.items()}
    yield from compared("decode step", steps, options.steps, STEP_TARGET)


def run_prompt(rig: Rig) -> None:
    rig.prefill(rig.prompt(PROMPT))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the times; 1 when a ratio is above its target."""
    options = parse(Options, MODULE, arguments)
    return run_program(MODULE, options, HOW, lambda folder: measure(options, folder))


if __name__ == "__main__":
    sys.exit(main())
