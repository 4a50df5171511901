"""Draws that depend on seed and position alone, and what a request asks of its logits before.

The distributions themselves are tested beside the kernels.
"""

from typing import Any

import pytest
import torch

from tandem.engine.batch.rows import BatchRows
from tandem.engine.schedule.sequence import PENDING, Chunk, Sequence
from tandem.engine.step.outcome import SampledToken
from tandem.engine.step.sampler import HostTokens, Sampler
from tandem.kernels.reference import sampling as reference
from tandem.kernels.reference.masks import mask_logits
from tandem.kernels.sampling.rows import NO_TOKEN, uniform
from tandem.runtime.errors import InternalError
from tandem.runtime.wire.messages import SamplingParams, StopConditions, TokenLogprobs

VOCAB_SIZE = 10
EOS = 9
# Token 3 is likeliest, then 5, 1, 0; the rest are tied far below.
LOGITS = [1.0, 1.5, -3.0, 3.0, -3.0, 2.5, -3.0, -3.0, -3.0, -3.0]


def sequence(
    generated: list[int] | None = None, prompt: list[int] | None = None, **sampling: Any
) -> Sequence:
    prompt = [0] if prompt is None else prompt
    return Sequence(
        "s",
        prompt + (generated or []),
        len(prompt),
        SamplingParams(**({"temperature": 0.0} | sampling)),
        StopConditions(max_tokens=99),
        block_table=[0],
    )


def run_sampler(
    rows: list[Chunk], logits: torch.Tensor, drawn: dict[int, int] | None = None
) -> list[SampledToken]:
    """The tokens of `rows`; `drawn` are tokens by row that a step before has left on the device."""
    for batch_row, seq in enumerate({id(row.seq): row.seq for row in rows}.values()):
        seq.batch_row = batch_row
    batch_rows = BatchRows(len(rows) + 1, 1, logits.device)
    sampler = Sampler(logits.shape[1], (EOS,), reference.sample, mask_logits, batch_rows)
    changes = batch_rows.take_changes([row.seq for row in rows])
    if changes is not None:
        batch_rows.apply(changes)
    for row, token_id in (drawn or {}).items():
        batch_rows.drawn[rows[row].seq.batch_row] = token_id
    plan = sampler.plan(rows, len(rows))
    index = torch.tensor([row.seq.batch_row for row in rows], dtype=torch.int64)
    positions = torch.tensor([row.end for row in rows], dtype=torch.int64)
    before = logits.clone()
    sampled = sampler.sample(logits, index, positions, plan)
    torch.testing.assert_close(logits, before, equal_nan=True)
    tokens = HostTokens(rows, sampled, plan).read()
    last = dict(zip(index.tolist(), tokens, strict=True))
    assert all(batch_rows.drawn[batch_row] == token.token_id for batch_row, token in last.items())
    return tokens


def sample(*seqs: Sequence, logits: list[float] = LOGITS, position: int = 1) -> list[SampledToken]:
    rows = [Chunk(seq, position - 1, position, True) for seq in seqs]
    return run_sampler(rows, torch.tensor([logits] * len(seqs)))


def sample_one(seq: Sequence, logits: list[float] = LOGITS) -> int:
    return sample(seq, logits=logits)[0].token_id


def draw_at(seq: Sequence, count: int, logits: torch.Tensor) -> list[SampledToken]:
    """What `seq` draws at positions [0, count), of the same `logits` [1, vocab_size]."""
    rows = [Chunk(seq, position - 1, position, True) for position in range(count)]
    return run_sampler(rows, logits.repeat(count, 1))


def test_the_hash_is_what_every_worker_computes() -> None:
    assert [uniform(seed, position) for seed, position in [(0, 0), (1, 0), (0, 1)]] == [
        0.6524484863740321,
        0.36818951565166946,
        0.03401170130434639,
    ]
    assert uniform(2**64 - 1, 2**31) == uniform(-1, 2**31)


def test_the_hash_is_uniform_over_positions_and_over_seeds() -> None:
    for values in (
        [uniform(7, position) for position in range(4000)],
        [uniform(seed, 7) for seed in range(4000)],
    ):
        counts = torch.histc(torch.tensor(values), bins=10, min=0, max=1)
        assert min(values) >= 0 and max(values) < 1
        # Chi-squared of 9 degrees of freedom: 30 is exceeded once in 2,000 hashes.
        assert ((counts - 400) ** 2 / 400).sum() < 30


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    seqs = [sequence(temperature=1.0, seed=seed) for seed in range(30)]
    together = [token.token_id for token in sample(*seqs, position=12)]
    company = [sequence(), sequence(temperature=0.5, top_k=2, seed=1), sequence(logprobs=2)]
    alone = [sample(*company, seq, position=12)[3].token_id for seq in seqs]
    elsewhere = [token.token_id for token in sample(*seqs, position=13)]
    assert together == alone
    assert together != elsewhere
    assert len(set(together)) > 2


def test_rounding_noise_does_not_reorder_the_candidates() -> None:
    torch.manual_seed(0)
    logits = torch.zeros(1000)
    noisy = logits + 1e-6 * torch.randn(1000)
    first = draw_at(sequence(temperature=1.0), 200, logits.unsqueeze(0))
    second = draw_at(sequence(temperature=1.0), 200, noisy.unsqueeze(0))
    assert sum(a == b for a, b in zip(first, second, strict=True)) >= 198


def test_repetition_penalty_reads_prompt_and_answer() -> None:
    assert sample_one(sequence(prompt=[3], repetition_penalty=1.3)) == 5
    assert sample_one(sequence(prompt=[3], generated=[5, 5], repetition_penalty=2.5)) == 1
    # A negative logit is multiplied, not divided.
    assert sample_one(sequence(prompt=[0], repetition_penalty=2.0), [-1.0, -1.5] + [-9.0] * 8) == 1


def test_presence_and_frequency_penalties_read_the_answer_only() -> None:
    assert sample_one(sequence(prompt=[3], presence_penalty=1.0)) == 3
    assert sample_one(sequence(generated=[3], presence_penalty=0.6)) == 5
    assert sample_one(sequence(generated=[3], frequency_penalty=0.3)) == 3
    assert sample_one(sequence(generated=[3, 3], frequency_penalty=0.3)) == 5


def test_logit_bias_forces_and_bans_and_ignores_what_is_no_token() -> None:
    assert sample_one(sequence(logit_bias={2: 100.0})) == 2
    assert sample_one(sequence(logit_bias={3: -100.0, 5: -100.0, 4711: 5.0})) == 1


def test_min_tokens_holds_back_every_stop_token() -> None:
    logits = [0.0] * 7 + [1.0, 4.0, 5.0]
    stop = StopConditions(max_tokens=99, min_tokens=2, stop_token_ids=[8])
    seq = sequence()
    seq.stop = stop
    assert sample_one(seq, logits) == 7
    seq.token_ids += [7, 7]
    assert sample_one(seq, logits) == EOS
    ignoring = sequence()
    ignoring.stop = StopConditions(max_tokens=99, min_tokens=2, ignore_eos=True)
    assert sample_one(ignoring, logits) == EOS


def test_logprobs_are_of_the_raw_logits() -> None:
    expected = torch.tensor(LOGITS).log_softmax(-1)
    seq = sequence(logprobs=2, temperature=0.3, logit_bias={2: 100.0}, repetition_penalty=1.5)
    [token] = sample(seq)
    assert token.token_id == 2 and isinstance(token.logprobs, TokenLogprobs)
    assert token.logprobs.logprob == pytest.approx(expected[2].item())
    assert [token_id for token_id, _ in token.logprobs.top] == [3, 5]
    assert token.logprobs.top[0][1] == pytest.approx(expected[3].item())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_give_an_error_and_no_token(
    bad: float, temperature: float
) -> None:
    with pytest.raises(InternalError, match="not finite"):
        sample(sequence(temperature=temperature), logits=[*LOGITS[:4], bad, *LOGITS[5:]])


def adjusting() -> list[dict[str, Any]]:
    return [
        {"frequency_penalty": 0.9}, {"presence_penalty": 0.9}, {"repetition_penalty": 1.5},
        {"logit_bias": {3: -2.0, 7: 5.0}}, {"frequency_penalty": 0.9, "logit_bias": {3: 1.0}},
        {"repetition_penalty": 1.2, "presence_penalty": 1.0, "frequency_penalty": -0.3}, {},
    ]  # fmt: skip


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_a_pending_token_counts_as_it_would_if_it_were_known(min_tokens: int) -> None:
    """Whatever it is: new, one of the prompt, one of the answer, biased, held back."""
    torch.manual_seed(5)
    known, pending, drawn = [], [], {}
    for params in adjusting():
        for generated in ([], [3], [3, 5, 5], [1, 2, 1]):
            for token_id in range(VOCAB_SIZE):
                pair = [
                    sequence(prompt=[0, 7], generated=[*generated, last], logprobs=1, **params)
                    for last in (token_id, PENDING)
                ]
                for seq in pair:
                    seq.stop = StopConditions(max_tokens=99, min_tokens=min_tokens)
                drawn[len(pending)] = token_id
                known.append(pair[0])
                pending.append(pair[1])
    logits = torch.randn(len(known), VOCAB_SIZE) * 1.5
    tokens = [
        run_sampler([Chunk(seq, 0, 1, True) for seq in seqs], logits, drawn)
        for seqs in (known, pending)
    ]
    assert tokens[0] == tokens[1]
    unadjusted = logits.argmax(-1).tolist()
    assert sum(t.token_id != u for t, u in zip(tokens[0], unadjusted, strict=True)) > 50


def test_rows_with_and_without_a_pending_token_may_stand_together() -> None:
    seqs = [
        sequence(generated=[PENDING], presence_penalty=2.0),
        sequence(generated=[3], presence_penalty=2.0),
        sequence(generated=[PENDING]),
        sequence(generated=[3, PENDING], frequency_penalty=0.3),
        sequence(generated=[PENDING], logit_bias={1: 50.0}),
        sequence(generated=[3, PENDING], frequency_penalty=0.3),
    ]
    rows = [Chunk(seq, 1, 2, True) for seq in seqs]
    tokens = run_sampler(rows, torch.tensor([LOGITS] * len(seqs)), {0: 3, 2: 3, 3: 3, 4: 1, 5: 5})
    # The last two: 3 twice costs 0.6 and 5 wins; once costs 0.3, and so does 5.
    assert [token.token_id for token in tokens] == [5, 5, 3, 5, 1, 3]


def test_a_pending_token_that_could_not_be_drawn_counts_for_nothing() -> None:
    seq = sequence(generated=[3, PENDING], frequency_penalty=0.3, presence_penalty=0.1)
    rows = [Chunk(seq, 2, 3, True)]
    [token] = run_sampler(rows, torch.tensor([LOGITS]), {0: NO_TOKEN})
    assert token.token_id == 3


def test_a_row_that_does_not_ask_for_logprobs_gets_none_next_to_one_that_does() -> None:
    alone, few, none, many = sample(
        sequence(logprobs=0), sequence(logprobs=1), sequence(), sequence(logprobs=40)
    )
    assert alone.logprobs is not None and alone.logprobs.top == []
    assert few.logprobs is not None and len(few.logprobs.top) == 1
    assert none.logprobs is None
    assert many.logprobs is not None and len(many.logprobs.top) == VOCAB_SIZE
