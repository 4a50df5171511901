"""Padded and replayed decode steps, and steps launched before the last one's tokens are known."""

import logging
import random
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from tandem.engine.config import EngineConfig, batch_sizes
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.sequence import PENDING, Chunk, Sequence, one_by_one
from tandem.engine.step.decode_graphs import Recorded
from tandem.engine.step.outcome import SampledToken
from tandem.models.random_model import write_random_model
from tandem.runtime.errors import InternalError
from tandem.runtime.process import progress
from tandem.runtime.wire.messages import SamplingParams, StopConditions
from tests.engine.step_doubles import CallAgain, Pipeline

T = TypeVar("T")
VOCAB_SIZE = 300
BLOCK_SIZE = 4
MAX_NUM_SEQS = 12
MAX_BLOCKS = 24
NUM_TOKENS = 20
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.01}
# What a sequence may ask for; the last ones need to know what was generated.
REQUESTS: list[dict[str, Any]] = [
    GREEDY,
    SEEDED,
    {"temperature": 1.2, "top_k": 30, "logprobs": 4},
    {**GREEDY, "logprobs": 0},
    {**GREEDY, "logit_bias": {5: 4.0, 17: -100.0}},
    {**GREEDY, "frequency_penalty": 1.5},
    {**GREEDY, "presence_penalty": 2.0, "logprobs": 2, "logit_bias": {9: 3.0}},
    {**SEEDED, "repetition_penalty": 1.4},
    {**GREEDY, "repetition_penalty": 1.8, "frequency_penalty": 0.7, "presence_penalty": -0.4},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = write_random_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE)
    return folder


def make_runner(folder: Path, recorder: CallAgain | None = None, **changes: Any) -> ModelRunner:
    options = {
        "model": str(folder), "dtype": "float32", "block_size": BLOCK_SIZE,
        "num_blocks": MAX_NUM_SEQS * MAX_BLOCKS, "max_model_len": BLOCK_SIZE * MAX_BLOCKS,
        "max_num_seqs": MAX_NUM_SEQS, "threads": 1,
    }  # fmt: skip
    runner = ModelRunner(EngineConfig(**(options | changes)), recorder)
    # What no sequence has written is poison.
    runner.kv_cache.tensor.fill_(float("nan"))
    return runner


def make_seqs(
    runner: ModelRunner, requests: list[dict[str, Any]], seed: int = 0, *, min_tokens: int = 0
) -> list[Sequence]:
    """One sequence per request, its prompt computed but for the last token.

    Every third one has no `min_tokens`, and every third one twice as many.
    """
    rng = random.Random(seed)
    blocks, batch_rows = list(range(MAX_NUM_SEQS * MAX_BLOCKS)), list(range(MAX_NUM_SEQS))
    rng.shuffle(blocks)
    rng.shuffle(batch_rows)
    seqs = []
    for index, request in enumerate(requests):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(2, 60))]
        seq = Sequence(
            f"s{index}",
            prompt,
            len(prompt),
            SamplingParams(seed=rng.randrange(2**64), **request),
            StopConditions(
                max_tokens=NUM_TOKENS, min_tokens=index % 3 * min_tokens, stop_token_ids=[3, 5, 8]
            ),
            block_table=blocks[index * MAX_BLOCKS : (index + 1) * MAX_BLOCKS],
            batch_row=batch_rows[index],
            num_computed_tokens=len(prompt) - 1,
        )
        runner.launch([Chunk(seq, 0, len(prompt) - 1, False)]).tokens()
        seqs.append(seq)
    return seqs


def written(runner: ModelRunner, seqs: list[Sequence]) -> list[torch.Tensor]:
    """Of every sequence, K/V [num_layers, 2, num_kv_heads, num_tokens, head_dim]."""
    kv = []
    for seq in seqs:
        blocks = runner.kv_cache.tensor[torch.tensor(seq.block_table)]
        in_order = blocks.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        kv.append(in_order[:, :, :, : seq.num_computed_tokens])
    return kv


def assert_alike(ours: list[SampledToken], theirs: list[SampledToken]) -> None:
    assert [token.token_id for token in ours] == [token.token_id for token in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.logprobs is None) == (other.logprobs is None)
        if mine.logprobs is not None and other.logprobs is not None:
            assert mine.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)
            mine_top, other_top = dict(mine.logprobs.top), dict(other.logprobs.top)
            assert mine_top == pytest.approx(other_top, abs=1e-4)


@pytest.mark.parametrize(("num_seqs", "seed"), [(1, 1), (3, 0), (3, 2), (9, 1), (9, 2), (12, 2)])
def test_padding_replays_and_overlap_change_neither_tokens_nor_keys_nor_values(
    folder: Path, num_seqs: int, seed: int
) -> None:
    # Plain ones are sampled within a replay; one that asks for more takes all out of it.
    kinds, min_tokens = [([GREEDY], 0), ([GREEDY, SEEDED], 0), (REQUESTS, 4)][seed]
    requests = random.Random(seed).choices(kinds, k=num_seqs)
    answers, caches = [], []
    for overlap in (False, True):
        for recorder in (None, CallAgain()):
            runner = make_runner(folder, recorder)
            seqs = make_seqs(runner, requests, seed, min_tokens=min_tokens)
            answers.append(Pipeline(runner, overlap).generate(seqs, NUM_TOKENS))
            caches.append(written(runner, seqs))
            assert recorder is None or recorder.num_replays >= NUM_TOKENS
    for answer, cache in zip(answers[1:], caches[1:], strict=True):
        for ours, theirs in zip(answer, answers[0], strict=True):
            assert_alike(ours, theirs)
        for mine, other in zip(cache, caches[0], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_token_that_is_not_known_yet_counts_as_a_known_one_does(
    folder: Path, request_: dict[str, Any]
) -> None:
    """Many of one kind, since the same token must come twice in a row to be counted wrongly."""
    answers = []
    for overlap in (False, True):
        runner = make_runner(folder)
        seqs = make_seqs(runner, [request_] * MAX_NUM_SEQS, min_tokens=4)
        answers.append(Pipeline(runner, overlap).generate(seqs, NUM_TOKENS))
    for ours, theirs in zip(*answers, strict=True):
        assert_alike(ours, theirs)


def test_padding_writes_to_nobody(folder: Path) -> None:
    runner = make_runner(folder, CallAgain())
    seqs = make_seqs(runner, [GREEDY] * 7)
    bystanders = make_seqs(runner, [GREEDY] * MAX_NUM_SEQS, seed=1)
    unused = sorted(
        {block for seq in bystanders for block in seq.block_table}
        - {block for seq in seqs for block in seq.block_table}
    )
    seqs = make_seqs(runner, [GREEDY] * 7)
    before = runner.kv_cache.tensor[unused].clone()
    drawn = runner._steps.batch_rows.drawn.clone()
    Pipeline(runner, overlap=True).generate(seqs, NUM_TOKENS)
    torch.testing.assert_close(
        runner.kv_cache.tensor[unused], before, rtol=0, atol=0, equal_nan=True
    )
    taken = [seq.batch_row for seq in seqs] + [runner._steps.batch_rows.padding_row]
    others = [batch_row for batch_row in range(MAX_NUM_SEQS) if batch_row not in taken]
    assert torch.equal(runner._steps.batch_rows.drawn[others], drawn[others])


def test_only_steps_of_decodes_alone_are_replayed(folder: Path) -> None:
    recorder = CallAgain()
    runner = make_runner(folder, recorder)
    first, second = make_seqs(runner, [GREEDY] * 2)
    assert recorder.num_replays == 0
    end = len(first.token_ids)
    runner.launch([Chunk(first, end - 1, end, False)]).tokens()
    assert recorder.num_replays == 0
    [token] = runner.launch([Chunk(first, end - 1, end, True), Chunk(second, 0, 2, False)]).tokens()
    assert recorder.num_replays == 0
    [again] = runner.launch([Chunk(first, end - 1, end, True)]).tokens()
    assert recorder.num_replays == 2  # the model and its sampling
    assert token == again


def test_a_batch_row_may_have_its_next_owner_while_the_last_ones_step_is_not_collected(
    folder: Path,
) -> None:
    alone, shared = make_runner(folder, CallAgain()), make_runner(folder, CallAgain())
    expected = []
    for index in range(2):
        seq = make_seqs(alone, [GREEDY] * 2)[index]
        expected.append(Pipeline(alone, overlap=False).generate([seq], 1)[0])
    first, second = make_seqs(shared, [GREEDY] * 2)
    end = len(first.token_ids)
    step = shared.launch([Chunk(first, end - 1, end, True)])
    second.batch_row = first.batch_row
    first.block_table, first.batch_row = [], -1
    shared.launch([Chunk(second, 0, second.num_computed_tokens, False)])
    [following] = Pipeline(shared, overlap=True).generate([second], 1)
    assert [step.tokens(), following] == expected


def test_a_step_after_one_without_finite_logits_stays_within_the_vocabulary(folder: Path) -> None:
    runner = make_runner(folder, CallAgain())
    [seq] = make_seqs(runner, [{**GREEDY, "presence_penalty": 1.0}])
    end = len(seq.token_ids)
    runner.kv_cache.tensor.fill_(float("nan"))
    failed = runner.launch([Chunk(seq, end - 1, end, True)])
    seq.token_ids.append(PENDING)
    after = runner.launch([Chunk(seq, end, end + 1, True)])
    for step in (failed, after):
        with pytest.raises(InternalError, match="not finite for request s0"):
            step.tokens()
    assert failed.seconds > 0


def test_tokens_outlive_the_steps_that_come_after(folder: Path) -> None:
    runner = make_runner(folder, CallAgain())
    seqs = make_seqs(runner, [GREEDY, SEEDED])
    chunks = [Chunk(seq, len(seq.token_ids) - 1, len(seq.token_ids), True) for seq in seqs]
    steps = [runner.launch(chunks), runner.launch(chunks[:1]), runner.launch(chunks[::-1])]
    first, _, last = (step.tokens() for step in steps)
    assert first == last[::-1]
    assert len({token.token_id for token in first}) == 2


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (64, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
        (100, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100]),
    ],
)
def test_batch_sizes_are_dense_where_a_row_costs_most(max_num_seqs: int, sizes: list[int]) -> None:
    assert batch_sizes(max_num_seqs) == sizes


def test_recording_tells_of_its_progress(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    plain = StringIO()
    monkeypatch.setattr("sys.stderr", plain)
    make_runner(folder, CallAgain())
    [line] = [line for line in caplog.messages if "recorded" in line]
    assert "5 batch sizes up to 12" in line and line.endswith("MiB")
    assert plain.getvalue() == ""
    terminal = StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    make_runner(folder, CallAgain())
    assert "recording decode steps" in terminal.getvalue()


class Refusing(CallAgain):
    """A recorder of calls that a graph cannot hold, once the largest ones were recorded."""

    def record(self, run: Callable[[], T]) -> Recorded[T]:
        recorded = super().record(run)
        if not self.num_left:
            raise RuntimeError("Cannot copy between CPU and CUDA tensors during graph capture")
        self.num_left -= 1
        return recorded

    def __init__(self, num_left: int) -> None:
        super().__init__()
        self.num_left = num_left


@pytest.mark.parametrize("num_recorded", [0, 5])
def test_steps_that_cannot_be_recorded_are_launched(
    folder: Path, num_recorded: int, caplog: pytest.LogCaptureFixture
) -> None:
    answers = []
    for recorder in (None, Refusing(num_recorded)):
        runner = make_runner(folder, recorder)
        seqs = make_seqs(runner, [GREEDY, SEEDED])
        answers.append(Pipeline(runner, overlap=True).generate(seqs, NUM_TOKENS))
    assert answers[0] == answers[1]
    [line] = [line for line in caplog.messages if "not recorded" in line]
    assert "Cannot copy between CPU and CUDA tensors" in line


@pytest.mark.parametrize("kind", range(3))
def test_known_tokens_of_an_answer_are_computed_in_one_replay(folder: Path, kind: int) -> None:
    """Beside others that draw, and that are not known yet."""
    requests = [[GREEDY], [SEEDED, GREEDY], REQUESTS][kind]
    forced = [7, 31, 7, 250]
    answers = []
    for recorder in (None, CallAgain()):
        runner = make_runner(folder, recorder)
        seqs = make_seqs(runner, random.Random(kind).choices(requests, k=5))
        bound, others = seqs[0], seqs[1:]
        drawn = Pipeline(runner, overlap=True).generate(others, 3)
        if recorder is None:
            for token_id in forced:
                end = len(bound.token_ids)
                runner.launch([Chunk(bound, end - 1, end, False)]).tokens()
                bound.token_ids.append(token_id)
            chunks = [Chunk(bound, len(bound.token_ids) - 1, len(bound.token_ids), True)]
        else:
            bound.token_ids += forced
            chunks = one_by_one(bound, len(bound.token_ids) - 5, len(bound.token_ids))
            num_replays = recorder.num_replays
        chunks += [Chunk(seq, len(seq.token_ids) - 1, len(seq.token_ids), True) for seq in others]
        answers.append([*drawn, runner.launch(chunks).tokens()])
        if recorder is not None:
            assert recorder.num_replays == num_replays + 1  # sampling is not replayed
    for ours, theirs in zip(*answers, strict=True):
        assert_alike(ours, theirs)


def test_a_step_of_more_tokens_than_were_recorded_is_computed_without_a_replay(
    folder: Path,
) -> None:
    recorder = CallAgain()
    runner = make_runner(folder, recorder)
    [seq] = make_seqs(runner, [GREEDY])
    end = len(seq.token_ids)
    seq.token_ids += range(MAX_NUM_SEQS)
    [token] = runner.launch(one_by_one(seq, end - 1, len(seq.token_ids))).tokens()
    assert recorder.num_replays == 0
    [again] = runner.launch([Chunk(seq, end - 1, len(seq.token_ids), True)]).tokens()
    assert token == again
