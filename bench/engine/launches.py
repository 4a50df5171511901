"""The host's time of launching the layers of a step, without a GPU: launches go nowhere.

The kernels of Qwen3-8B's shape are built for a chip that is not there, and the layers of steps run
over tensors without memory. cuBLAS's products have a stand-in that takes no time.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Arguments
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tandem.bench.engine.setting import QWEN3_8B
from tandem.bench.report.figures import Figure
from tandem.bench.report.options import option, parse
from tandem.bench.report.program import run_program
from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.rope import rope_tables
from tandem.engine.batch.batch import Batch, build_batch, pack_step
from tandem.engine.batch.rows import BatchRows
from tandem.engine.decoder.decoder import Model
from tandem.engine.decoder.kernel_set import load_kernels
from tandem.engine.execution.prebuild import META
from tandem.engine.memory.kv_blocks import block_shape
from tandem.engine.schedule.sequence import Chunk, Sequence
from tandem.engine.weights.weights import empty_weights
from tandem.kernels.reference.linear import Linear
from tandem.kernels.reference.quantized import Matrix
from tandem.runtime.errors import ConfigError
from tandem.runtime.wire.block_hash import num_blocks_of
from tandem.runtime.wire.messages import SamplingParams, StopConditions

MODULE = "tandem.bench.engine.launches"
HOW = {
    "host's Python time": "CPU time of the thread that launches the layers of one step, without a "
    "GPU: Triton's part up to CUDA's own call, and Tandem's; median of a round's steps, median of "
    "rounds. What PyTorch's operations take is that of tensors without memory"
}
DTYPE = torch.bfloat16
BLOCK_SIZE = 64
NUM_BLOCKS = 1024
ARCH = 90
CONTEXT = 1024  # of a decode


def _batch(num_decodes: int, num_prompt_tokens: int) -> Batch:
    lengths = [CONTEXT] * num_decodes + [num_prompt_tokens] * bool(num_prompt_tokens)
    chunks = []
    for row, length in enumerate(lengths):
        stop = StopConditions(max_tokens=1)
        seq = Sequence(f"r{row}", [0] * length, length, SamplingParams(), stop, batch_row=row)
        chunks.append(Chunk(seq, CONTEXT - 1 if row < num_decodes else 0, length, True))
    rows = BatchRows(len(chunks), num_blocks_of(max(lengths), BLOCK_SIZE), META)
    return build_batch(pack_step(chunks), rows, BLOCK_SIZE)


def _pack_linear(weight: Matrix) -> Linear:
    """Return a product that takes no time: the same tensor for each number of tokens."""
    known: dict[int, torch.Tensor] = {}

    def multiply(x: torch.Tensor) -> torch.Tensor:
        if len(x) not in known:
            known[len(x)] = torch.empty(len(x), weight.shape[0], dtype=x.dtype, device=META)
        return known[len(x)]

    return multiply


def _launch_nowhere(run: Callable[..., Any], *args: Any, grid: Any, warmup: bool, **of: Any) -> Any:
    return run(*args, grid=grid, warmup=True, **of)


def figures(config: ModelConfig, num_rounds: int, num_steps: int) -> Iterator[Figure]:
    """Measure steps of prompts, and of answers beside a prompt."""
    import triton  # exists on Linux only
    from triton.runtime import driver

    from tandem.bench.kernels.compile import AbsentChip
    from tandem.kernels.building import running_kernels_by

    if triton.knobs.runtime.interpret:
        raise ConfigError("launches are not those of a GPU with TRITON_INTERPRET=1")
    driver.set_active(AbsentChip(ARCH))
    kernels = replace(load_kernels("triton"), pack_linear=_pack_linear)
    tables = rope_tables(config, CONTEXT, DTYPE, META)
    model = Model(config, empty_weights(config, DTYPE, META), tables, kernels)
    pool = torch.empty(NUM_BLOCKS, *block_shape(config, BLOCK_SIZE), dtype=DTYPE, device=META)
    for num_decodes, num_prompt_tokens in ((0, 1024), (32, 256), (32, 0)):
        with torch.inference_mode(), running_kernels_by(_launch_nowhere):
            batch = _batch(num_decodes, num_prompt_tokens)
            model.hidden(batch, pool)  # builds
            rounds = [_measure(model, batch, pool, num_steps) for _ in range(num_rounds)]
        label = f"host's Python time, {num_decodes} answers and {num_prompt_tokens} prompt tokens"
        yield Figure(f"launches_{num_decodes}_{num_prompt_tokens}", label, "ms", tuple(rounds))


def _measure(model: Model, batch: Batch, pool: torch.Tensor, num_steps: int) -> float:
    times_ms = []
    for _ in range(num_steps):
        start = time.thread_time()
        model.hidden(batch, pool)
        times_ms.append((time.thread_time() - start) * 1e3)
    return statistics.median(times_ms)


@dataclass(frozen=True, slots=True)
class Options:
    """Measure the host's time of launching the layers of a step; needs no GPU."""

    layers: int = option(QWEN3_8B.num_layers, "layers of the model", least=1)
    steps: int = option(50, "steps that are timed", least=1)
    rounds: int = option(3, "rounds, of which medians are shown", least=1)
    output: Path | None = option(None, "write everything as JSON")


def main(arguments: Arguments[str] | None = None) -> int:
    """Print the times."""
    options = parse(Options, MODULE, arguments)
    config = replace(QWEN3_8B, num_layers=options.layers)
    counts = options.rounds, options.steps
    return run_program(MODULE, options, HOW, lambda _: figures(config, *counts))


if __name__ == "__main__":
    sys.exit(main())
