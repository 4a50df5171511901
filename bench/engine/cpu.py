"""A model on a CPU in three forms, each in turns with the plain one that it is held against.

python -m tandem.bench.engine.cpu
"""

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args
from unittest import mock

import torch

from tandem.bench.engine.quantized import CODES, with_codes
from tandem.bench.engine.rig import Rig
from tandem.bench.engine.setting import QWEN3_8B
from tandem.bench.report.figures import Figure, at_least, at_most
from tandem.bench.report.options import option, parse
from tandem.bench.report.program import run_program
from tandem.bench.report.turns import compared
from tandem.engine.architecture.config import ModelConfig
from tandem.engine.config import EngineConfig
from tandem.engine.execution.model_code import ModelImpl
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.weights.random_weights import random_weights
from tandem.engine.weights.weights import ModelWeights
from tandem.kernels.cpu.experts import pack_experts, route
from tandem.kernels.cpu.launch import silu_mul
from tandem.kernels.cpu.linear import pack_linear, pack_panels
from tandem.kernels.reference.experts import ExpertWeights
from tandem.kernels.reference.routing import Routing
from tandem.models.random_model import PRESETS, write_shape

MODULE = "tandem.bench.engine.cpu"
HOW = {
    "modules": "CPU time on one core of a prompt of 512 tokens and of a decode step, by modules of "
    "transformers beside native code: a random Qwen3 of 16 layers of 768",
    "codes": "CPU time on one core of a decode step with weights as codes, beside bfloat16: 16 "
    "layers of 768, whose embedding stays in bfloat16",
    "experts": "time of a token through 14 layers of 8 experts, of which 2 are chosen, beside "
    "dense layers that read the same bytes, on two threads",
    "ratio": "taken in each round, in which all forms take a turn; medians of rounds are shown",
}
Form = Literal["modules", "codes", "experts"]


@dataclass(frozen=True, slots=True)
class Options:
    """Time three forms of a model on a CPU, each beside the plain one."""

    only: tuple[Form, ...] = option(get_args(Form), "forms to time")
    output: Path | None = option(None, "write everything as JSON")


CONTEXT, PROMPT, NUM_BLOCKS = 128, 512, 512


def _rig(*, dtype: str, model: str = "", model_impl: ModelImpl = "auto", **parts: Any) -> Rig:
    """Return an engine on one thread; `parts` are a runner's, in place of the folder `model`."""
    config = EngineConfig(
        model=model,
        dtype=dtype,
        model_impl=model_impl,
        device="cpu",
        threads=1,
        num_blocks=NUM_BLOCKS,
        enable_prefix_cache=False,
    )
    return Rig(config, ModelRunner(config, **parts))


# ---- the modules of transformers --------------------------------------------------------------

MODEL_IMPLS: tuple[ModelImpl, ...] = ("native", "transformers")


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


def modules(folder: Path) -> Iterator[Figure]:
    """Yield the times of prompts and steps of models that are written into `folder`."""
    for dtype in ("bfloat16", "float32"):
        model = write_shape(folder / dtype, replace(PRESETS["small"], dtype=dtype))
        with mock.patch("tandem.kernels.cpu.linear.pack_panels", _Panels()):
            rigs: dict[str, Rig] = {
                impl: _rig(dtype=dtype, model=str(model), model_impl=impl) for impl in MODEL_IMPLS
            }
        prompts = {name: partial(_run_prompt, each) for name, each in rigs.items()}
        yield from compared(f"{dtype} prompt", prompts, 8, at_most(1.15))
        for each in rigs.values():
            each.place(1, CONTEXT)
        steps = {name: each.step for name, each in rigs.items()}
        yield from compared(f"{dtype} decode step", steps, 200, at_most(1.10))


def _run_prompt(rig: Rig) -> None:
    rig.prefill(rig.prompt(PROMPT))


# ---- weights as codes -------------------------------------------------------------------------

CODES_SHAPE = replace(
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


def codes(_: Path) -> Iterator[Figure]:
    """Yield the times of a step with every code, and how many times as fast it is."""
    plain = random_weights(CODES_SHAPE, torch.bfloat16, torch.device("cpu"))
    forms: dict[str, tuple[ModelConfig, ModelWeights]] = {"bfloat16": (CODES_SHAPE, plain)}
    forms |= {code: with_codes(CODES_SHAPE, plain, code) for code in CODES}
    rigs = {
        name: _rig(dtype="bfloat16", model_config=model, weights=weights)
        for name, (model, weights) in forms.items()
    }
    for each in rigs.values():
        each.place(1, CONTEXT)
    steps = {name: each.step for name, each in rigs.items()}
    return compared("decode step", steps, 100, at_least(1.3))


# ---- layers of experts ------------------------------------------------------------------------

NUM_EXPERTS, ROUTING = 8, Routing(2)
HIDDEN_SIZE, WIDTH = 1024, 1408  # of an expert; dense layers are as wide as the chosen ones
NUM_LAYERS = 14  # more bytes than a cache holds, on every side
Layer = Callable[[torch.Tensor], torch.Tensor]


def experts(_: Path) -> Iterator[Figure]:
    """Yield the times of layers of experts and of dense ones in two dtypes."""
    torch.set_num_threads(2)
    for dtype in (torch.float32, torch.bfloat16):
        works = {
            name: partial(_run_layers, [make(dtype) for _ in range(NUM_LAYERS)], dtype)
            for name, make in (("dense", _dense), ("experts", _mixture))
        }
        label = f"{str(dtype).removeprefix('torch.')} layers"
        yield from compared(label, works, 40, at_most(1.15), clock=time.perf_counter)


def _mixture(dtype: torch.dtype) -> Layer:
    """Return a layer of experts with its router."""
    router = pack_linear(_numbers(dtype, NUM_EXPERTS, HIDDEN_SIZE))
    experts = pack_experts(
        ExpertWeights(
            _numbers(dtype, NUM_EXPERTS, 2 * WIDTH, HIDDEN_SIZE),
            _numbers(dtype, NUM_EXPERTS, HIDDEN_SIZE, WIDTH),
        )
    )

    def compute(x: torch.Tensor) -> torch.Tensor:
        expert_ids = torch.empty(len(x), ROUTING.num_chosen, dtype=torch.int32)
        weights = torch.empty(len(x), ROUTING.num_chosen)
        route(router(x), None, ROUTING, expert_ids, weights)
        return experts(x, expert_ids, weights)

    return compute


def _dense(dtype: torch.dtype) -> Layer:
    """Return a feed-forward layer as wide as the chosen experts."""
    width = ROUTING.num_chosen * WIDTH
    gate_up = pack_linear(_numbers(dtype, 2 * width, HIDDEN_SIZE))
    down = pack_linear(_numbers(dtype, HIDDEN_SIZE, width))

    def compute(x: torch.Tensor) -> torch.Tensor:
        hidden = gate_up(x)
        opened = hidden.new_empty(len(x), width)
        silu_mul(hidden, opened)
        return down(opened)

    return compute


def _numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape).mul_(shape[-1] ** -0.5).to(dtype)


def _run_layers(layers: Sequence[Layer], dtype: torch.dtype) -> None:
    """Compute `layers` of one new token, all with the same input."""
    x = torch.randn(1, HIDDEN_SIZE).to(dtype)
    for layer in layers:
        layer(x)


FORMS: dict[Form, Callable[[Path], Iterator[Figure]]] = {
    "modules": modules,
    "codes": codes,
    "experts": experts,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the times; 1 when a ratio misses its target."""
    options = parse(Options, MODULE, arguments)

    def measure(folder: Path) -> Iterator[Figure]:
        for form in options.only:
            yield from FORMS[form](folder)

    return run_program(MODULE, options, HOW, measure)


if __name__ == "__main__":
    sys.exit(main())
