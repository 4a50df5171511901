"""Tokens drawn by the kernels and by their reference, as plain Python would draw them."""

import math
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch

from tandem.kernels.reference import sampling as reference
from tandem.kernels.sampling import launch as sampling
from tandem.kernels.sampling.rows import NO_TOKEN, SampledRows, new_sampled_rows
from tests.kernels.sampling.oracle import Asked, acceptable, adjusted, as_adjustments, as_rows
from tests.kernels.tolerance import COSTLY_DTYPES, DTYPES, UNIT, launchers

INF, NAN = math.inf, math.nan
# Several chunks and groups in a small vocabulary, and lists that overflow.
SMALL = sampling.SamplingConfig(chunk=128, capacity=64, tile=512)

Sample = Callable[..., None]


def by_kernel(*args: object, **options: object) -> None:
    sampling.sample(*args, **({"config": SMALL} | options))  # type: ignore[arg-type]


samplers = launchers("sample", by_kernel, reference.sample)


def draw(
    sample: Sample,
    logits: torch.Tensor,
    asked: list[Asked],
    logprob_rows: list[int] | None = None,
    num_top: int = 0,
) -> SampledRows:
    """Sample into poisoned tensors; adjustments only where a row has some."""
    device = logits.device
    out = new_sampled_rows(len(asked), len(logprob_rows or []), num_top, device)
    for one in fields(out):
        getattr(out, one.name).fill_(-77)
    has_entries = any(a.entries for a in asked)
    before = logits.clone()
    sample(
        logits,
        as_rows(asked, str(device)),
        out,
        adjustments=as_adjustments(asked, str(device)) if has_entries else None,
        logprob_rows=None if logprob_rows is None else torch.tensor(logprob_rows, device=device),
    )
    assert torch.equal(logits.nan_to_num(7), before.nan_to_num(7))
    return out


def assert_right(
    sample: Sample, logits: torch.Tensor, asked: list[Asked], num_uncertain: int = 0
) -> list[int]:
    """Return the tokens that were drawn."""
    token_ids = draw(sample, logits, asked).token_ids.tolist()
    rows = [[float(value) for value in row] for row in logits.tolist()]
    right = [acceptable(*pair) for pair in zip(rows, asked, strict=True)]
    assert sum(len(tokens) > 1 for tokens in right) <= num_uncertain
    wrong = [i for i, token in enumerate(token_ids) if token not in right[i]]
    assert not wrong, [(asked[i], token_ids[i], right[i]) for i in wrong]
    return token_ids


def random_logits(
    num_rows: int, vocab_size: int, device: str, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    torch.manual_seed(num_rows * vocab_size + dtype.itemsize)
    return (torch.randn(num_rows, vocab_size) * 3).to(dtype).to(device)


MIXED = [
    Asked(temperature=0), Asked(seed=2**64 - 1), Asked(temperature=0.7, seed=2**63), Asked(top_k=4),
    Asked(top_k=1), Asked(top_k=60), Asked(top_k=10_000), Asked(top_p=0.9),
    Asked(temperature=3, top_p=0.97), Asked(top_p=1e-6), Asked(min_p=0.2),
    Asked(temperature=5, min_p=0.05), Asked(min_p=1), Asked(temperature=1.3, top_k=5, top_p=0.8),
    Asked(temperature=2, top_k=70, top_p=0.9, min_p=0.01),
    Asked(temperature=0.8, top_p=0.95, min_p=0.03), Asked(temperature=1e-6),
    Asked(temperature=100, top_k=6, top_p=0.7),
]  # fmt: skip


@samplers
@pytest.mark.parametrize("dtype", COSTLY_DTYPES)
def test_every_option_alone_and_together_in_one_batch(
    sample: Sample, dtype: torch.dtype, device: str
) -> None:
    asked = [replace(a, seed=a.seed ^ i, position=i * i) for i, a in enumerate(MIXED)]
    assert_right(sample, random_logits(len(asked), 555, device, dtype), asked, num_uncertain=1)


@samplers
@pytest.mark.parametrize(
    "filters",
    [
        Asked(temperature=2, top_k=40),
        Asked(temperature=2, top_p=0.6),
    ],
    ids=["many", "nucleus"],
)
def test_a_draw_is_the_inverse_cdf_of_the_hash(sample: Sample, filters: Asked, device: str) -> None:
    asked = [replace(filters, seed=5, position=position) for position in range(4)]
    logits = random_logits(1, 300, device).repeat(len(asked), 1)
    assert len(set(assert_right(sample, logits, asked, num_uncertain=1))) > 1


@samplers
def test_ties_at_the_edge_of_a_filter_are_all_kept(sample: Sample, device: str) -> None:
    logits = torch.full((1, 200), -30.0, device=device)
    logits[0, [3, 70, 130, 131]] = 2.0
    logits[0, 199] = 3.0
    edges = [Asked(top_k=2), Asked(top_p=0.5), Asked(top_k=3, top_p=0.9)]
    asked = [replace(a, seed=s) for a in edges for s in range(2)]
    assert_right(sample, logits.repeat(len(asked), 1), asked)


@samplers
def test_equal_logits_are_drawn_alike_and_the_first_is_the_best(
    sample: Sample, device: str
) -> None:
    # More candidates than a list holds.
    asked = [
        Asked(temperature=0),
        Asked(seed=1),
        Asked(top_k=2, seed=2),
        Asked(top_p=0.999, seed=3),
        Asked(min_p=0.5, seed=4),
    ]
    for value in (0.0, -1e30):
        logits = torch.full((len(asked), 300), value, device=device)
        assert_right(sample, logits, asked, num_uncertain=1)


@samplers
def test_zeros_of_both_signs_are_equal(sample: Sample, device: str) -> None:
    logits = torch.tensor([[-1.0, 0.0, -0.0, 0.0, -5.0]], device=device)
    asked = [Asked(top_k=1, seed=s) for s in range(3)] + [Asked(top_p=0.1, seed=1)]
    assert_right(sample, logits.repeat(len(asked), 1), asked)
    assert_right(sample, -logits.repeat(2, 1), [Asked(temperature=0), Asked(top_k=2, seed=9)])


@samplers
def test_tokens_of_minus_infinity_are_never_drawn(sample: Sample, device: str) -> None:
    logits = torch.full((5, 150), -INF, device=device)
    logits[:, 140] = -2e37
    logits[1:, 7] = -2e37
    asked = [
        Asked(temperature=0),
        Asked(top_k=5, seed=1),
        Asked(top_p=0.9, seed=2),
        Asked(seed=3),
        Asked(min_p=0.1, temperature=50, seed=4),
    ]
    assert_right(sample, logits, asked)


@samplers
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_best_is_reported_and_disturbs_no_other(
    sample: Sample, temperature: float, device: str
) -> None:
    logits = random_logits(6, 200, device)
    logits[0, 150] = NAN
    logits[1, 3] = INF
    logits[2] = -INF
    logits[3] = NAN
    logits[5, 9] = -NAN
    one = Asked(temperature=temperature, top_k=3, seed=4)
    token_ids = draw(sample, logits, [one] * 6).token_ids.tolist()
    assert token_ids[:4] == [NO_TOKEN] * 4 and token_ids[5] == NO_TOKEN
    assert token_ids[4] in acceptable(logits[4].tolist(), one)


@samplers
@pytest.mark.parametrize("vocab_size", [1, 64, 65, 129, 1000])
def test_any_size_of_vocabulary(sample: Sample, vocab_size: int, device: str) -> None:
    asked = [Asked(temperature=0), Asked(seed=3), Asked(top_k=2, top_p=0.9, seed=8)]
    assert_right(sample, random_logits(3, vocab_size, device), asked)


@samplers
def test_what_lies_between_rows_is_never_read(sample: Sample, device: str) -> None:
    padded = torch.full((4, 320), NAN, device=device)
    padded[:, :301] = random_logits(4, 301, device)
    asked = [Asked(temperature=0), Asked(seed=1), Asked(top_k=2, seed=2), Asked(top_p=0.9, seed=3)]
    assert_right(sample, padded[:, :301], asked)


@samplers
def test_no_rows_are_no_work(sample: Sample, device: str) -> None:
    out = draw(sample, torch.empty(0, 100, device=device), [])
    assert out.token_ids.shape == (0,)


@samplers
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_rows_all_are_greedy(sample: Sample, dtype: torch.dtype, device: str) -> None:
    logits = random_logits(5, 700, device, dtype)
    logits[3] = NAN
    out = new_sampled_rows(5, 0, 0, logits.device)
    sample(logits, None, out)
    best = [NO_TOKEN if i == 3 else row.index(max(row)) for i, row in enumerate(logits.tolist())]
    assert out.token_ids.tolist() == best


ADJUSTED = [
    Asked(temperature=0, repetition=1.5, entries={i: (i % 3, 0.0, False) for i in range(90)}),
    Asked(temperature=0, frequency=0.7, entries={i: (i % 4 - 1, 0.0, False) for i in range(80)}),
    Asked(temperature=0, presence=2.5, entries={i: (i % 2, 0.0, False) for i in range(70)}),
    Asked(temperature=0, entries={199: (-1, 100.0, False)}),
    Asked(temperature=0),
    Asked(seed=1, entries=dict.fromkeys(range(0, 200, 2), (-1, -100.0, False))),
    Asked(seed=2, held_until=9, position=8, entries=dict.fromkeys(range(150), (0, 5.0, True))),
    Asked(seed=2, held_until=9, position=9, entries=dict.fromkeys(range(150), (0, 5.0, True))),
    Asked(seed=3, top_k=3, repetition=0.7, entries={i: (i, 0.1, i == 9) for i in range(9, 50)}),
    Asked(seed=4, top_p=0.9, frequency=-0.3, entries=dict.fromkeys(range(5, 8), (9, 3.0, False))),
    Asked(seed=5, top_p=0.99, temperature=9, presence=1, entries={90: (1, 0, False)}),
    Asked(seed=6, min_p=0.2, repetition=1.2, entries=dict.fromkeys(range(100), (0, 0, False))),
    Asked(
        seed=7, temperature=0.5, frequency=1, entries=dict.fromkeys(range(200), (1, -0.5, False))
    ),
]


@samplers
@pytest.mark.parametrize("dtype", COSTLY_DTYPES)
def test_penalties_bias_and_held_tokens_come_first_and_in_float32(
    sample: Sample, dtype: torch.dtype, device: str
) -> None:
    logits = random_logits(len(ADJUSTED), 200, device, dtype)
    drawn = assert_right(sample, logits, ADJUSTED)
    # Nothing of this is vacuous: most rows' tokens are others without their adjustments.
    rows = logits.tolist()
    plain = [acceptable(row, replace(a, entries={})) for row, a in zip(rows, ADJUSTED, strict=True)]
    assert sum(token not in tokens for token, tokens in zip(drawn, plain, strict=True)) >= 5


@samplers
def test_an_adjusted_row_without_a_finite_best_is_reported(sample: Sample, device: str) -> None:
    logits = random_logits(4, 100, device)
    logits[0, 5] = logits[1, 5] = NAN
    asked = [
        Asked(temperature=0, entries={5: (-1, 1.0, False)}),
        # What is held back is never looked at.
        Asked(temperature=0, held_until=1, entries={5: (-1, 0.0, True)}),
        Asked(temperature=0, held_until=1, entries=dict.fromkeys(range(100), (-1, 0.0, True))),
        Asked(temperature=1, entries={5: (-1, INF, False)}),
    ]
    token_ids = draw(sample, logits, asked).token_ids.tolist()
    row = adjusted(logits[1].tolist(), asked[1])
    assert token_ids == [NO_TOKEN, row.index(max(row)), NO_TOKEN, NO_TOKEN]


@samplers
@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_are_of_the_raw_logits_of_the_rows_that_ask(
    sample: Sample, dtype: torch.dtype, device: str
) -> None:
    logits = random_logits(4, 500, device, dtype)
    expected = logits.double().log_softmax(-1)
    bias = dict.fromkeys(range(3, 500, 5), (-1, 30.0, False))
    asked = [Asked(), Asked(temperature=0, entries=bias), Asked(top_k=3), Asked(temperature=0)]
    out = draw(sample, logits, asked, logprob_rows=[1, 3, 2], num_top=6)
    for place, row in enumerate([1, 3, 2]):
        # Sums of a few hundred in float32, and logarithms of magnitude 20.
        near = pytest.approx(0, abs=100 * UNIT[torch.float32])
        token = out.token_ids[row]
        assert out.logprobs[place].item() - expected[row, token].item() == near
        order = sorted(range(500), key=lambda i: (-logits[row, i].item(), i))[:6]
        assert out.top_ids[place].tolist() == order
        assert (out.top_logprobs[place].double() - expected[row, order]).abs().max().item() == near


@samplers
def test_the_likeliest_come_in_order_and_of_equals_the_lowest_id(
    sample: Sample, device: str
) -> None:
    logits = torch.zeros(3, 200, device=device)
    logits[0, [150, 20]] = 1.0
    logits[1] = -INF
    logits[1, 77] = 0.0
    logits[2, ::2] = -0.0
    out = draw(sample, logits, [Asked(temperature=0)] * 3, logprob_rows=[0, 1, 2], num_top=5)
    assert out.top_ids.tolist() == [[20, 150, 0, 1, 2], [77, 0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert out.top_logprobs[1].tolist() == [0.0, -INF, -INF, -INF, -INF]


@pytest.mark.parametrize("num_top", [0, 4])
def test_given_tokens_are_scored_as_drawn_ones_are(num_top: int, device: str) -> None:
    logits = random_logits(3, 300, device, torch.float32)
    drawn = draw(by_kernel, logits, [Asked()] * 3, logprob_rows=[0, 1, 2], num_top=num_top)
    for score in (sampling.token_logprobs, reference.token_logprobs):
        out = new_sampled_rows(3, 3, num_top, logits.device)
        out.token_ids.copy_(drawn.token_ids)
        score(logits, out)
        assert torch.equal(out.token_ids, drawn.token_ids)
        assert torch.equal(out.top_ids, drawn.top_ids)
        torch.testing.assert_close(out.logprobs, drawn.logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(out.top_logprobs, drawn.top_logprobs, atol=1e-5, rtol=0)


@samplers
def test_as_many_of_the_likeliest_as_there_are_tokens(sample: Sample, device: str) -> None:
    logits = random_logits(1, 7, device)
    out = draw(sample, logits, [Asked()], logprob_rows=[0], num_top=7)
    assert out.top_ids.tolist() == logits.argsort(descending=True).tolist()
    assert out.top_logprobs.exp().sum().item() == pytest.approx(1)


def test_neither_company_nor_tiles_change_a_token(device: str) -> None:
    asked = [replace(a, seed=99, position=i) for i, a in enumerate(MIXED[5:9])]
    logits = random_logits(len(asked), 600, device)
    together = draw(by_kernel, logits, asked).token_ids.tolist()
    alone = [
        draw(by_kernel, logits[i : i + 1], [one]).token_ids.item() for i, one in enumerate(asked)
    ]
    assert together == alone

    def with_lists(*args: object, **options: object) -> None:
        config = sampling.SamplingConfig(chunk=256, capacity=1024, tile=1024)
        sampling.sample(*args, **options, config=config)  # type: ignore[arg-type]

    assert draw(with_lists, logits, asked).token_ids.tolist() == together


def test_configurations_to_measure_fit_the_vocabulary() -> None:
    offered = list(sampling.candidates(151936, 2))
    assert 10 <= len(offered) <= 60 and len(set(offered)) == len(offered)
    assert all(isinstance(getattr(c, f.name), int) for c in offered for f in fields(c))


BAD = [
    *[Asked(temperature=value, seed=4) for value in (NAN, INF, -1.0)],
    *[Asked(top_p=value, seed=4) for value in (NAN, INF, -1.0)],
    *[Asked(min_p=value, seed=4) for value in (NAN, -INF, 5.0)],
    *[Asked(top_k=value, seed=4) for value in (-(2**63), -1, 2**31, 2**63 - 1)],
    *[Asked(repetition=value, entries={5: (1, 0, False)}) for value in (0.0, NAN)],
    *[Asked(frequency=value, entries={5: (1, 0, False)}) for value in (NAN, INF, -INF)],
    *[Asked(temperature=value, entries={5: (1, NAN, False)}) for value in (0.0, 1.0)],
    Asked(temperature=INF, entries={5: (1, 0.0, True)}, held_until=9),
]


@samplers
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in Triton's interpreter
def test_numbers_that_no_request_may_hold_disturb_no_other_row(sample: Sample, device: str) -> None:
    others = [Asked(temperature=0), Asked(seed=3), Asked(top_p=0.9, seed=8), Asked(top_k=4, seed=2)]
    num_bad = len(BAD)
    logits = random_logits(num_bad + 4, 150, device)
    alone = draw(sample, logits[num_bad:], others, [0, 3], 2)
    beside = draw(sample, logits, [*BAD, *others], [*range(num_bad), num_bad, num_bad + 3], 2)
    assert beside.token_ids[num_bad:].tolist() == alone.token_ids.tolist()
    assert torch.equal(beside.top_ids[num_bad:], alone.top_ids)
    drawn = beside.token_ids[:num_bad].tolist()
    assert all(token_id == NO_TOKEN or 0 <= token_id < 150 for token_id in drawn), drawn
