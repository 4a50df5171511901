"""Seconds of calls on a device: by replays of a CUDA graph, over inputs that no cache holds."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
Sample = Callable[[], float]  # seconds of one call, measured anew

ROTATED_BYTES = 256 << 20  # that calls in a row touch before data comes again: four L2 of an H200
MAX_INPUT_SETS = 64
MAX_CALLS_IN_SAMPLE = 256
HEAD_START_CYCLES = 20_000_000  # some 10 ms in which the host queues what is timed


@dataclass(frozen=True, slots=True)
class Setting:
    """Where to measure, and how much: a dry run shows that everything runs, and no more."""

    device: torch.device
    rounds: int
    num_warmups: int  # rounds before those
    sample_s: float  # that the calls of one sample take together, about

    @property
    def is_dry(self) -> bool:
        return self.device.type != "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16; float32 where the interpreter runs the kernels: its bfloat16 dots are wrong."""
        return torch.float32 if self.is_dry else torch.bfloat16

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.is_dry else full

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def num_sets(self, bytes_of_one: float) -> int:
        """Input sets that calls go through in turns, so that no cache serves them."""
        if self.is_dry:
            return 1
        return max(2, min(MAX_INPUT_SETS, math.ceil(ROTATED_BYTES / bytes_of_one)))


def setting_for(device: str) -> Setting:
    """Seven rounds of some milliseconds on a GPU, one of single calls elsewhere."""
    is_gpu = torch.device(device).type == "cuda"
    return Setting(
        torch.device(device), rounds=7 if is_gpu else 1, num_warmups=int(is_gpu), sample_s=6e-3
    )


def make_sample(calls: Sequence[Call], setting: Setting) -> tuple[Sample, str]:
    """A function that times `calls` in turns, and how it does; they have run once already."""
    if setting.is_dry:
        return _wall_clock(calls), "wall clock"
    once_s = _events(calls)()  # launches included: an upper bound
    passes = math.ceil(setting.sample_s / (once_s * len(calls)))
    many = list(calls) * max(1, min(passes, MAX_CALLS_IN_SAMPLE // len(calls)))
    try:
        return _graph(many), f"replays of a CUDA graph of {len(many)} calls"
    except RuntimeError:
        torch.cuda.synchronize()
        return _events(many), f"events around {len(many)} calls"


def synchronize(setting: Setting) -> None:
    if not setting.is_dry:
        torch.cuda.synchronize(setting.device)


def _graph(calls: Sequence[Call]) -> Sample:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return lambda: _between_events(graph.replay) / len(calls)


def _events(calls: Sequence[Call]) -> Sample:
    def all_calls() -> None:
        for call in calls:
            call()

    def sample() -> float:
        torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        return _between_events(all_calls) / len(calls)

    return sample


def _between_events(run: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _wall_clock(calls: Sequence[Call]) -> Sample:
    def sample() -> float:
        started_at = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - started_at) / len(calls)

    return sample
