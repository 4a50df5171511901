"""A whole model answers alike on every kind of kernels, padded and ahead as well."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.sequence import Chunk, Sequence
from tandem.engine.step.outcome import SampledToken
from tandem.models.random_model import write_random_model
from tandem.runtime.wire.messages import SamplingParams, StopConditions
from tests.engine.step_doubles import CallAgain, Pipeline
from tests.engine.tiny_models import make_model

VARIED = {
    "gemma2": {"sliding_window": 7, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
    "olmo3": {"sliding_window": 7},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7},
    "smollm3": {"attention_bias": True, "mlp_bias": True, "no_rope_layer_interval": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = write_random_model(
        tmp_path_factory.mktemp("model"), num_layers=1, hidden_size=32
    )
    return folder


def make_runner(
    folder: Path, kernels: str, recorder: CallAgain | None = None, **options: Any
) -> ModelRunner:
    config = EngineConfig(
        model=str(folder),
        kernels=kernels,
        dtype="float32",
        num_blocks=32,
        max_model_len=64,
        max_num_seqs=5,
        threads=1,
        **options,
    )
    runner = ModelRunner(config, recorder)
    runner.kv_cache.tensor.fill_(float("nan"))
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the runner's own stream does not wait for the fill
    return runner


def test_every_kind_of_kernels_answers_alike(folder: Path) -> None:
    assert_alike(folder)


@pytest.mark.parametrize(
    "model_type",
    ["gpt_oss", *(pytest.param(t, marks=pytest.mark.slow) for t in VARIED if t != "gpt_oss")],
)
def test_every_kind_of_kernels_varies_alike(model_type: str, tmp_path: Path) -> None:
    """Windows, caps, norms over all heads, GELU, biases, experts, layers without rope."""
    narrow = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
    make_model(tmp_path, model_type, **(narrow | VARIED[model_type]))
    assert_alike(tmp_path)


def assert_alike(folder: Path) -> None:
    kinds = ["torch", "triton", *([] if torch.cuda.is_available() else ["c"])]
    answers = [answer(make_runner(folder, kernels)) for kernels in kinds]
    assert all(each == answers[0] for each in answers)
    assert torch.tensor(answers[0]).unique().numel() > 2


def answer(runner: ModelRunner) -> list[list[int]]:
    """Two prompts, the longer in two chunks, then two steps of both together."""
    long, short = sequence(29, [7, 3, 9], 1), sequence(5, [12], 0)
    runner.launch([Chunk(long, 0, 18, False)]).tokens()
    steps = [[Chunk(short, 0, 5, True), Chunk(long, 18, 29, True)]]
    for _ in range(3):
        chunks = steps.pop()
        for chunk, token in zip(chunks, runner.launch(chunks).tokens(), strict=True):
            chunk.seq.token_ids.append(token.token_id)
        steps.append([Chunk(s, s.num_tokens - 1, s.num_tokens, True) for s in (short, long)])
    return [long.token_ids[29:], short.token_ids[5:]]


def sequence(num_tokens: int, block_table: list[int], batch_row: int, **sampling: Any) -> Sequence:
    return Sequence(
        f"of {num_tokens}",
        [11 + 3 * index for index in range(num_tokens)],
        num_tokens,
        SamplingParams(**({"temperature": 0} | sampling)),
        StopConditions(max_tokens=9),
        block_table=block_table,
        batch_row=batch_row,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "requests",
    [
        [{}, {}, {}],
        [{"temperature": 0.9, "top_p": 0.9, "seed": 3}, {}, {"temperature": 1, "seed": 1}],
        [{"frequency_penalty": 1.5, "logprobs": 2}, {"repetition_penalty": 1.7}, {}],
    ],
)
def test_padded_steps_ahead_of_the_host_answer_as_plain_ones_do(
    folder: Path, requests: list[dict[str, Any]]
) -> None:
    """On the kernels that a graph would hold; three sequences in a step of four."""
    answers = []
    for kernels, recorder, overlap in (
        ("torch", None, False),
        ("triton", None, True),
        ("triton", CallAgain(), True),
    ):
        runner = make_runner(folder, kernels, recorder)
        seqs = [
            sequence(9 * index + 6, [3 * index, 3 * index + 1, 3 * index + 2], index + 1, **request)
            for index, request in enumerate(requests)
        ]
        for seq in seqs:
            seq.num_computed_tokens = seq.num_tokens - 1
            runner.launch([Chunk(seq, 0, seq.num_computed_tokens, False)]).tokens()
        answers.append(Pipeline(runner, overlap).generate(seqs, 4))
    assert ids(answers[0]) == ids(answers[1]) == ids(answers[2])


def ids(answer: list[list[SampledToken]]) -> list[list[int]]:
    return [[token.token_id for token in tokens] for tokens in answer]
