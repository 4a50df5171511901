"""Decodes that read shared blocks together: launches, answers, refusals."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tandem.engine.config import EngineConfig
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.sequence import Chunk, Sequence
from tandem.kernels.attention import decode
from tandem.kernels.attention.prefixes import SharedPrefixes, share_prefixes
from tests.engine.step_doubles import CallAgain
from tests.engine.tiny_models import make_model
from tests.kernels.test_fused_layers import KERNELS, counted, make
from tests.kernels.test_runner_with_kernels import VARIED, make_runner, sequence

COMMON = 16  # tokens of the block with which two sequences begin
TABLES = ([0, 1], [2, 3], [0, 4])


def sequences() -> list[Sequence]:
    seqs = [
        sequence(num_tokens, list(table), row)
        for row, (num_tokens, table) in enumerate(zip((20, 19, 22), TABLES, strict=True))
    ]
    seqs[1].token_ids[:] = reversed(seqs[1].token_ids)
    return seqs


def prefill(runner: ModelRunner, seqs: list[Sequence]) -> None:
    """Compute all tokens but the last; those of the common block once."""
    for seq in seqs:
        start = COMMON if seq.batch_row == 2 else 0
        runner.launch([Chunk(seq, start, seq.num_tokens - 1, False)]).tokens()


def answers(runner: ModelRunner) -> list[list[int]]:
    """Two decode steps of all, and between them one in which a prompt is computed as well."""
    seqs, other = sequences(), sequence(5, [5], 3)
    prefill(runner, seqs)
    for step in range(3):
        chunks = [Chunk(seq, seq.num_tokens - 1, seq.num_tokens, True) for seq in seqs]
        if step == 1:
            chunks.append(Chunk(other, 0, 5, True))
        for chunk, token in zip(chunks, runner.launch(chunks).tokens(), strict=True):
            chunk.seq.token_ids.append(token.token_id)
    return [seq.token_ids[seq.num_prompt_tokens :] for seq in (*seqs, other)]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[SharedPrefixes]:
    """The prefixes of all steps."""
    made: list[SharedPrefixes] = []

    def noted(*args: Any) -> SharedPrefixes:
        made.append(share_prefixes(*args))
        return made[-1]

    monkeypatch.setattr(decode, "share_prefixes", noted)
    return made


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are counted where interpreted")
def test_a_layer_of_a_decode_step_is_one_launch_more(tmp_path: Path) -> None:
    found: list[Counter[str]] = []
    for num_layers in (1, 2):
        folder = make(tmp_path / f"{num_layers}", "qwen3", num_hidden_layers=num_layers)
        runner = make_runner(folder, "triton", fused_products=True, cascade_attention=True)
        seqs = sequences()
        prefill(runner, seqs)
        with counted() as work:
            step = runner.launch([Chunk(s, s.num_tokens - 1, s.num_tokens, True) for s in seqs])
        step.tokens()
        found.append(work)
    assert found[1] - found[0] == KERNELS + Counter(shared_prefix_kernel=1)


@pytest.mark.slow
@pytest.mark.parametrize("recorder", [None, CallAgain()], ids=["eager", "graphs"])
def test_sequences_that_share_blocks_answer_as_others_do(
    tmp_path: Path, plans: list[SharedPrefixes], recorder: CallAgain | None
) -> None:
    folder = make(tmp_path, "qwen3")
    expected = answers(make_runner(folder, "torch"))
    runner = make_runner(folder, "triton", recorder, cascade_attention=True)
    del plans[:]
    assert answers(runner) == expected
    assert torch.tensor(expected[0]).unique().numel() > 1
    # Of each step's decodes, in a graph with a row of padding, and of the tokens sampled in the
    # step with a prompt.
    padding = [0] if recorder else []
    decodes, mixed, sampled, last = (
        [COMMON, 0, COMMON, *more] for more in (padding, [], [0], padding)
    )
    steps = [plan.ends[0].tolist() for plan in plans]
    assert steps == [decodes, sampled, mixed, last]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss"])
def test_layers_with_a_window_read_their_own_blocks(
    model_type: str, tmp_path: Path, plans: list[SharedPrefixes]
) -> None:
    narrow = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
    make_model(tmp_path, model_type, **(narrow | VARIED[model_type]))
    num_groups = 2  # of layers, each with blocks of its own
    runners = [
        make_runner(tmp_path, "torch"),
        make_runner(tmp_path, "triton", cascade_attention=True),
    ]
    found = []
    for runner in runners:
        seqs = [
            sequence(
                count, [num_groups * block + group for block in table for group in (0, 1)], row
            )
            for row, (count, table) in enumerate([(20, [0, 1]), (18, [0, 2])])
        ]
        prefill(runner, seqs)
        chunks = [Chunk(seq, seq.num_tokens - 1, seq.num_tokens, True) for seq in seqs]
        with counted() as work:
            step = runner.launch(chunks)
        found.append([token.token_id for token in step.tokens()])
    assert found[0] == found[1]
    assert work["shared_prefix_kernel"] == 1 and work["paged_decode_kernel"] == 2
    assert plans[-1].ends[0].tolist() == [COMMON, COMMON]


def test_sums_in_one_order_and_by_the_rest_of_a_step_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="deterministic and cascade_attention exclude"):
        EngineConfig(deterministic=True, cascade_attention=True)
    assert not EngineConfig(deterministic=True).cascade_attention
