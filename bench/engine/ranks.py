"""A model in two ranks on a CPU beside one process, and the price of bits that no width changes.

python -m tandem.bench.engine.ranks
"""

import mmap
import os
import socket
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import msgspec
import torch

from tandem.bench.engine.rig import Rig
from tandem.bench.report.figures import Figure, Target, at_most, percentile
from tandem.bench.report.options import option, parse
from tandem.bench.report.program import run_program
from tandem.bench.report.turns import compared
from tandem.engine.batch.batch import PackedStep
from tandem.engine.batch.rows import BatchRows, RowChanges
from tandem.engine.config import EngineConfig
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.ranks.channel import receive, send
from tandem.engine.ranks.step_message import StepMessage
from tandem.engine.schedule.sequence import PENDING
from tandem.kernels.cpu.ranks import BUFFER_BYTES, RankExchange, shared_bytes
from tandem.models.random_model import PRESETS, write_shape

MODULE = "tandem.bench.engine.ranks"
NUM_CALLS = 20_000
HOW = {
    "ranks": "time of a decode step by two processes of a thread each, beside one of two threads: "
    "a random Qwen3 of 16 layers of 768 with one answer, and with eight; needs two idle cores",
    "CPU time": "of rank 0 alone in a step, beside one process of one thread, which no other "
    "program prolongs much; a rank spins for up to 50 us whenever it waits",
    "invariance": "CPU time on one core of a decode step and of a prompt of 512 tokens in one "
    "process that adds up as all widths do (tp_invariant), beside one that does not",
    "sum": "time of a sum over two ranks, as a layer calls it, from Python and back; the median of "
    f"{NUM_CALLS} calls; on a busy machine the 10th percentile is of those that found both running",
    "step message": "time of making, sending, receiving and reading the message of a decode step "
    "whose tokens the host does not have yet, on one thread",
    "ratio": "taken in each round, in which all forms take a turn; medians of rounds are shown",
}
Part = Literal["sum", "message", "invariance", "ranks"]
CONTEXT, PROMPT, NUM_BLOCKS = 128, 512, 512
SUM_TARGETS = {4: at_most(2.0), 16: at_most(8.0)}  # KiB |-> us
NUM_RUNNING, BLOCK_SIZE = 256, 16


@dataclass(frozen=True, slots=True)
class Options:
    """Time two ranks of a model on a CPU beside one process."""

    only: tuple[Part, ...] = option(get_args(Part), "parts to time")
    rounds: int = option(60, "of each comparison", least=1)
    output: Path | None = option(None, "write everything as JSON")


def sums(_: Path, _num_rounds: int) -> Iterator[Figure]:
    """Yield the times of a sum of two processes."""
    memory = mmap.mmap(-1, shared_bytes(2, BUFFER_BYTES))
    leader_pid, follower_pid = os.getpid(), os.fork()
    rank = int(follower_pid == 0)
    exchange = RankExchange(memory, rank, 2, BUFFER_BYTES, leader_pid, patience_s=60.0)
    times = {size: _time_sums(exchange, size) for size in SUM_TARGETS}
    if rank:
        os._exit(0)
    os.waitpid(follower_pid, 0)
    for size, target in SUM_TARGETS.items():
        yield from _microseconds(f"sum of two ranks, {size} KiB", times[size], target)


def _time_sums(exchange: RankExchange, size_kib: int) -> list[float]:
    part = torch.randn(size_kib * 256)
    return _seconds_of(partial(exchange.add_up, part, torch.float32))


def message(_: Path, _num_rounds: int) -> Iterator[Figure]:
    """Yield the time of the message of a step."""
    rows, nothing = array("q", range(NUM_RUNNING)), array("q")
    step = PackedStep(
        num_decodes=NUM_RUNNING,
        num_prefills=0,
        sampled=[],
        sampled_ends=rows,
        batch_rows=rows,
        positions=rows,
        token_ids=array("q", [PENDING]) * NUM_RUNNING,
        prefill_batch_rows=nothing,
        prefill_context_lens=nothing,
        prefill_cu_seqlens=array("q", [0]),
        logits_indices=rows,
        scored=[],
    )
    table = BatchRows(NUM_RUNNING, 64, torch.device("cpu"))
    new_blocks = rows[: NUM_RUNNING // BLOCK_SIZE]
    changes = RowChanges(places=new_blocks, block_ids=new_blocks)
    leader, follower = socket.socketpair()

    with leader, follower, follower.makefile("rb") as file:

        def pass_on() -> None:
            sent = StepMessage.of(1, step, changes, table)
            send(leader, msgspec.msgpack.encode(sent))
            data = receive(file)
            assert data is not None
            received = msgspec.msgpack.decode(data, type=StepMessage)
            assert received.step().num_decodes == NUM_RUNNING and received.changes().places

        times = _seconds_of(pass_on)
    yield from _microseconds(f"step message, {NUM_RUNNING} running", times, at_most(100.0))


def _seconds_of(call: Callable[[], object]) -> list[float]:
    seconds = []
    for _ in range(NUM_CALLS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds


def _microseconds(label: str, seconds: Sequence[float], target: Target) -> Iterator[Figure]:
    name = label.replace(" ", "_")
    yield Figure(name, label, "us", (percentile(seconds, 0.5) * 1e6,), target)
    yield Figure(f"{name}_p10", "  10th percentile", "us", (percentile(seconds, 0.1) * 1e6,))


def invariance(model: Path, num_rounds: int) -> Iterator[Figure]:
    """Yield the times of one process in the order of sums of all widths, beside its own order."""
    rigs = {
        name: _rig(_runner(model, threads=1, tp_invariant=is_invariant))
        for name, is_invariant in (("own order", False), ("order of all widths", True))
    }
    prompts = {name: partial(_run_prompt, rig) for name, rig in rigs.items()}
    yield from compared("prompt", prompts, max(num_rounds // 6, 1), at_most(1.03))
    for rig in rigs.values():
        rig.place(1, CONTEXT)
    steps = {name: rig.step for name, rig in rigs.items()}
    yield from compared("decode step", steps, num_rounds, at_most(1.05))


def ranks(model: Path, num_rounds: int) -> Iterator[Figure]:
    """Yield the times of steps of two ranks beside one process of two threads."""
    forms = {
        "one thread": {"threads": 1},
        "two threads": {"threads": 2},
        "two ranks": {"threads": 1, "tp": 2},
    }
    for num_seqs in (1, 8):
        runners = {name: _runner(model, **form) for name, form in forms.items()}
        rigs = {name: _rig(runner) for name, runner in runners.items()}
        for rig in rigs.values():
            rig.place(num_seqs, CONTEXT)
        steps = {name: rig.step for name, rig in rigs.items()}
        answers = f"{num_seqs} answer{'s' * (num_seqs > 1)}"
        alone = {"one process": steps.pop("one thread"), "rank 0": steps["two ranks"]}
        yield from compared(f"CPU time, {answers}", alone, num_rounds, at_most(1.0))
        label, clock = f"decode step, {answers}", time.perf_counter
        yield from compared(label, steps, num_rounds, at_most(1.10), clock=clock)
        for runner in runners.values():
            runner.close()


def _runner(model: Path, **settings: object) -> ModelRunner:
    fields = {"model": str(model), "device": "cpu", "dtype": "float32", "num_blocks": NUM_BLOCKS}
    fields |= {"enable_prefix_cache": False}
    return ModelRunner(EngineConfig.model_validate(fields | settings))


def _rig(runner: ModelRunner) -> Rig:
    return Rig(runner.config, runner)


def _run_prompt(rig: Rig) -> None:
    rig.prefill(rig.prompt(PROMPT))


PARTS: dict[Part, Callable[[Path, int], Iterator[Figure]]] = {
    "sum": sums,  # first: it forks, before there are threads
    "message": message,
    "invariance": invariance,
    "ranks": ranks,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the times; 1 when a ratio misses its target."""
    options = parse(Options, MODULE, arguments)

    def measure(folder: Path) -> Iterator[Figure]:
        model = folder / "model"
        if {"invariance", "ranks"}.intersection(options.only):
            write_shape(model, replace(PRESETS["small"], dtype="float32"))
        for name, part in PARTS.items():
            if name in options.only:
                yield from part(model, options.rounds)

    return run_program(MODULE, options, HOW, measure)


if __name__ == "__main__":
    sys.exit(main())
