"""Decode steps as they run on a GPU, without one: padded, replayed, and one ahead of the host."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch

from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.sequence import PENDING, Chunk, Sequence
from tandem.engine.step.decode_graphs import Recorded
from tandem.engine.step.outcome import SampledToken
from tandem.kernels.sampling.rows import SampledRows

T = TypeVar("T")


class CallAgain:
    """A Recorder whose replays call again and write to where the first call's result is."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, run: Callable[[], T]) -> Recorded[T]:
        result = run()

        def replay() -> None:
            self.num_replays += 1
            for kept, fresh in zip(_tensors(result), _tensors(run()), strict=True):
                kept.copy_(fresh)

        return Recorded(replay, result)

    def held_bytes(self) -> int:
        return 0


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, SampledRows):
        return [getattr(result, field.name) for field in fields(result)]
    return [result]


@dataclass
class Pipeline:
    """Decodes sequences that have batch rows and blocks, one step ahead of the host or not.

    A step's tokens are known to the next only as PENDING if `overlap`.
    """

    runner: ModelRunner
    overlap: bool

    def generate(self, seqs: list[Sequence], num_tokens: int) -> list[list[SampledToken]]:
        """`num_tokens` more of each; the tokens of every sequence."""
        drawn: list[list[SampledToken]] = [[] for _ in seqs]
        before: Callable[[], None] | None = None
        for _ in range(num_tokens):
            collect = self._launch(seqs, drawn)
            if self.overlap:
                if before is not None:
                    before()
                before = collect
            else:
                collect()
        if before is not None:
            before()
        return drawn

    def _launch(self, seqs: list[Sequence], drawn: list[list[SampledToken]]) -> Callable[[], None]:
        chunks = []
        for seq in seqs:
            end = len(seq.token_ids)
            chunks.append(Chunk(seq, seq.num_computed_tokens, end, True))
            seq.num_computed_tokens = end
        step = self.runner.launch(chunks)
        for seq in seqs:
            seq.token_ids.append(PENDING)

        def collect() -> None:
            for chunk, tokens, token in zip(chunks, drawn, step.tokens(), strict=True):
                assert chunk.seq.token_ids[chunk.end] == PENDING
                chunk.seq.token_ids[chunk.end] = token.token_id
                tokens.append(token)

        return collect
