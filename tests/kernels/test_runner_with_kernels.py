"""A whole model on the Triton kernels answers as on their twins."""

from pathlib import Path

import torch

from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.engine.sequence import Chunk, Sequence
from tandem.models.random_model import write_random_model
from tandem.runtime.messages import SamplingParams, StopConditions


def test_kernels_and_twins_answer_alike(tmp_path: Path) -> None:
    write_random_model(tmp_path, num_layers=1, hidden_size=32)
    answers = []
    for kernels in ("torch", "triton"):
        config = EngineConfig(
            model=str(tmp_path), kernels=kernels, dtype="float32", num_blocks=32, threads=1
        )
        runner = ModelRunner(config)
        runner.kv_cache.tensor.fill_(float("nan"))
        answers.append(answer(runner))
    assert answers[0] == answers[1]
    assert torch.tensor(answers[0]).unique().numel() > 2


def answer(runner: ModelRunner) -> list[list[int]]:
    """Two prompts, the longer in two chunks, then four steps of both together."""
    long, short = sequence(29, [7, 3, 9]), sequence(5, [12])
    runner.run([Chunk(long, 0, 18, False)])
    steps = [[Chunk(short, 0, 5, True), Chunk(long, 18, 29, True)]]
    for _ in range(4):
        chunks = steps.pop()
        for chunk, token in zip(chunks, runner.run(chunks), strict=True):
            chunk.seq.token_ids.append(token.token_id)
        steps.append([Chunk(s, s.num_tokens - 1, s.num_tokens, True) for s in (short, long)])
    return [long.token_ids[29:], short.token_ids[5:]]


def sequence(num_tokens: int, block_table: list[int]) -> Sequence:
    return Sequence(
        f"of {num_tokens}",
        [11 + 3 * index for index in range(num_tokens)],
        num_tokens,
        SamplingParams(temperature=0),
        StopConditions(max_tokens=9),
        block_table=block_table,
    )
