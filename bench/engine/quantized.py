"""Decode steps of one sequence on a CPU: weights as codes beside the same model in bfloat16.

python -m tandem.bench.engine.quantized
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from tandem.bench.engine.rig import Rig
from tandem.bench.engine.setting import QWEN3_8B
from tandem.bench.report.figures import Figure, at_least
from tandem.bench.report.options import option, parse
from tandem.bench.report.program import run_program
from tandem.bench.report.turns import compared
from tandem.engine.config import EngineConfig
from tandem.engine.loading.random_weights import random_weights
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.weights import ModelWeights
from tandem.kernels.reference.quantized import BITS, Code, QuantizedMatrix

MODULE = "tandem.bench.engine.quantized"
TARGET = at_least(1.3)  # times as fast as bfloat16
HOW = {"step": "CPU time on one core; in a round every form takes a turn, and the ratio is taken"}
SHAPE = replace(
    QWEN3_8B,
    hidden_size=768,
    intermediate_size=2048,
    num_layers=16,
    num_heads=12,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=32_768,
    tie_word_embeddings=True,
)
CONTEXT, NUM_BLOCKS = 128, 256
# Inputs that share a scale: those of Qwen3's FP8, of AWQ and of gpt-oss.
GROUP_SIZES: dict[Code, int] = {"float8": 128, "int4": 128, "float4": 32}


@dataclass(frozen=True, slots=True)
class Options:
    """Time decode steps of 16 layers of 768, whose embedding stays in bfloat16, on one core."""

    rounds: int = option(5, "in each of which every form takes a turn")
    steps: int = option(20, "of each form in a round")
    output: Path | None = option(None, "write everything as JSON")


def coded(weight: torch.Tensor, code: Code) -> QuantizedMatrix:
    """Return random codes in the shape of a matrix, none of which stands for more than it has."""
    out_size, in_size = weight.shape
    group_size = GROUP_SIZES[code]
    codes = torch.randint(0, 96, (out_size, in_size * BITS[code] // 8), dtype=torch.uint8)
    scales = torch.full((out_size, in_size // group_size), 0.1 * in_size**-0.5)
    zeros = torch.zeros_like(scales) if code == "int4" else None
    return QuantizedMatrix(code, codes, scales.half(), group_size, zeros)


def with_codes(weights: ModelWeights, code: Code) -> ModelWeights:
    """Return `weights` with the matrices of all layers as codes."""
    names = ("qkv", "output", "gate_up", "down")
    layers = (
        replace(layer, **{name: coded(getattr(layer, name), code) for name in names})  # type: ignore[arg-type]
        for layer in weights.layers
    )
    return replace(weights, layers=tuple(layers))


def rig(weights: ModelWeights) -> Rig:
    """Return an engine over `weights` with one sequence to decode."""
    config = EngineConfig(device="cpu", dtype="bfloat16", threads=1, num_blocks=NUM_BLOCKS)
    made = Rig(config, ModelRunner(config, model_config=SHAPE, weights=weights))
    made.place(1, CONTEXT)
    return made


def run_steps(rig: Rig, num_steps: int) -> None:
    for _ in range(num_steps):
        rig.step()


def measure(options: Options) -> Iterator[Figure]:
    """Yield the times of a step of every form."""
    plain = random_weights(SHAPE, torch.bfloat16, torch.device("cpu"))
    rigs = {"bfloat16": rig(plain)}
    rigs |= {code: rig(with_codes(plain, code)) for code in GROUP_SIZES}
    works = {name: partial(run_steps, each, options.steps) for name, each in rigs.items()}
    return compared("decode step", works, options.rounds, TARGET, num_calls=options.steps)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the times; 1 when the ratio of a form is below its target."""
    options = parse(Options, MODULE, arguments)
    return run_program(MODULE, options, HOW, lambda _: measure(options))


if __name__ == "__main__":
    sys.exit(main())
