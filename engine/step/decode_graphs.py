"""Decode steps as graphs: recorded at start for padded batch sizes, replayed with one call each.

A graph repeats the same kernels on the same addresses. All that differs from step to step is in
tensors at fixed addresses: the inputs here, block tables and sampling parameters in BatchRows.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch

from tandem.engine.batch.batch import NO_POSITION, PackedStep
from tandem.engine.batch.upload import on_host, upload
from tandem.engine.step.model_steps import ModelSteps
from tandem.engine.step.sampler import DRAWN, GREEDY, SamplingPlan
from tandem.kernels.sampling.rows import SampledRows
from tandem.runtime.process.progress import ProgressBar

logger = logging.getLogger(__name__)

MIB = 2**20

Replay = Callable[[], None]
T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Recorded(Generic[T]):
    """A call that can be repeated without Python; its result is the same tensors each time."""

    replay: Replay
    result: T


class Recorder(Protocol):
    """Records calls on one device."""

    def record(self, run: Callable[[], T]) -> Recorded[T]:
        """Record `run`, calling it once or more; the result is valid from the first replay on."""

    def held_bytes(self) -> int:
        """Return the device memory in use by all processes."""


class CudaRecorder:
    """Records CUDA graphs, all of them in one memory pool. They must be replayed one at a time."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], T]) -> Recorded[T]:
        # Run once before: Triton builds, and cuBLAS and the kernels' counters allocate.
        run()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads of a worker may allocate meanwhile, which does not concern this stream.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            result = run()
        return Recorded(graph.replay, result)

    def held_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._stream.device)
        return total - free


@dataclass(slots=True, frozen=True)
class _Graph:
    """The recorded calls of one batch size."""

    inputs: torch.Tensor  # [3, size]
    logits: Recorded[torch.Tensor]  # [size, vocab_size]
    greedy: Recorded[SampledRows] | None  # None: another rank draws
    drawn: Recorded[SampledRows] | None


class DecodeGraphs:
    """Decode steps of up to max(sizes) sequences. Steps run in the order of the calls.

    The next step overwrites the results of this one: copy them, on the stream of the steps. Without
    `draws` another rank draws from the logits, and steps run by `follow`.
    """

    def __init__(
        self, steps: ModelSteps, sizes: list[int], recorder: Recorder, *, draws: bool = True
    ) -> None:
        self._steps = steps
        self._draws = draws
        self._batch_rows = steps.batch_rows
        self._sizes = sorted(sizes)
        self._inputs = torch.empty(3 * self._sizes[-1], dtype=torch.int64, device=steps.pool.device)
        started, held = time.perf_counter(), recorder.held_bytes()
        self._graphs: dict[int, _Graph] = {}
        # The largest first: the smaller graphs reuse its memory.
        for size in _with_progress(self._sizes[::-1]):
            self._graphs[size] = self._record(size, recorder)
        logger.info(
            "decode steps of %d batch sizes up to %d recorded in %.1f s, %.0f MiB",
            len(self._sizes),
            self._sizes[-1],
            time.perf_counter() - started,
            (recorder.held_bytes() - held) / MIB,
        )

    def can_run(self, step: PackedStep) -> bool:
        """Return True for a step of decodes alone, of a size that was recorded."""
        return step.is_decode and step.num_decodes <= self._sizes[-1]

    def run(self, step: PackedStep, plan: SamplingPlan) -> SampledRows:
        """Compute a step that `can_run`; return the drawn tokens."""
        graph, num_rows = self.follow(step), step.num_decodes
        if not plan.is_plain or not step.samples_all:
            inputs, logits = graph.inputs[:, :num_rows], graph.logits.result[:num_rows]
            if not step.samples_all:
                [indices] = upload([step.logits_indices], inputs.device)
                inputs, logits = inputs.index_select(1, indices), logits.index_select(0, indices)
            return self._steps.sample(logits, inputs, plan)
        sampling = graph.greedy if plan.is_greedy else graph.drawn
        assert sampling is not None
        sampling.replay()
        return replace(sampling.result, token_ids=sampling.result.token_ids[:num_rows])

    def follow(self, step: PackedStep) -> _Graph:
        """Compute the logits of a step that `can_run`; return its graph."""
        graph = self._graphs[self._sizes[bisect_left(self._sizes, step.num_decodes)]]
        padded = step.padded(graph.inputs.shape[1], self._batch_rows.padding_row)
        host = on_host(padded, self._batch_rows.device)
        graph.inputs.view(-1).copy_(host, non_blocking=True)
        graph.logits.replay()
        return graph

    def _record(self, size: int, recorder: Recorder) -> _Graph:
        inputs = self._inputs[: 3 * size].view(3, size)
        padding = torch.tensor([self._batch_rows.padding_row, NO_POSITION, 0], dtype=torch.int64)
        inputs.copy_(padding.unsqueeze(1))
        steps = self._steps
        logits = recorder.record(lambda: steps.logits(inputs))
        if not self._draws:
            return _Graph(inputs, logits, None, None)
        return _Graph(
            inputs,
            logits,
            recorder.record(lambda: steps.sample(logits.result, inputs, GREEDY)),
            recorder.record(lambda: steps.sample(logits.result, inputs, DRAWN)),
        )


def _with_progress(sizes: list[int]) -> Iterator[int]:
    """Yield the sizes, and show the progress through them."""
    with ProgressBar("recording decode steps", total=len(sizes), on_line=logger.info) as bar:
        for done, size in enumerate(sizes):
            bar.update(done)
            yield size
