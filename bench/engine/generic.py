"""Decode steps and prompts of one model on a CPU, by transformers' modules beside native code.

python -m tandem.bench.engine.generic
"""

import hashlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import process_time
from unittest import mock

import torch

from tandem.bench.engine.rig import Rig
from tandem.bench.report.options import option, parse
from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.ring import ModelImpl
from tandem.kernels.cpu.linear import pack_panels
from tandem.models.random_model import write_random_model

MODULE = "tandem.bench.engine.generic"
MOST = {"decode step": 1.10, "prompt": 1.15}
CONTEXT, PROMPT, NUM_BLOCKS = 128, 512, 512


@dataclass(frozen=True, slots=True)
class Options:
    """Time a random Qwen3 of 16 layers of 768 on one core, in turns."""

    dtype: str = option("bfloat16", "or float32")
    steps: int = option(200, "decode steps of each")
    prompts: int = option(8, "of 512 tokens, of each")


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


def rig(folder: str, dtype: str, model_impl: ModelImpl) -> Rig:
    config = EngineConfig(
        model=folder,
        dtype=dtype,
        model_impl=model_impl,
        device="cpu",
        threads=1,
        num_blocks=NUM_BLOCKS,
        enable_prefix_cache=False,
    )
    return Rig(config, ModelRunner(config))


def in_turns(works: Sequence[Callable[[], object]], count: int) -> list[float]:
    """Return the median CPU seconds of each work; others' programs prolong those less."""
    seconds: list[list[float]] = [[] for _ in works]
    for index in range(2 + count):
        for work, its_seconds in zip(works, seconds, strict=True):
            began = process_time()
            work()
            if index >= 2:  # the first warm up
                its_seconds.append(process_time() - began)
    return [statistics.median(each) for each in seconds]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the medians; 1 when a ratio is above its bound."""
    options = parse(Options, MODULE, arguments)
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(
            folder,
            vocab_size=32_768,
            hidden_size=768,
            num_layers=16,
            num_heads=12,
            num_kv_heads=4,
            head_dim=64,
            intermediate_size=2048,
            dtype=options.dtype,
        )
        with mock.patch("tandem.kernels.cpu.linear.pack_panels", _Panels()):
            rigs = [rig(folder, options.dtype, impl) for impl in ("native", "transformers")]
    prompts = [lambda rig=rig: rig.prefill(rig.prompt(PROMPT)) for rig in rigs]
    times = {"prompt": in_turns(prompts, options.prompts)}
    for each in rigs:
        each.place(1, CONTEXT)
    times["decode step"] = in_turns([each.step for each in rigs], options.steps)
    is_over = False
    for name, (native, generic) in times.items():
        is_over |= generic / native > MOST[name]
        print(
            f"{options.dtype}, {name}: {1e3 * native:.2f} ms native, "
            f"{1e3 * generic:.2f} ms by transformers, {generic / native:.3f} times"
        )
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())
