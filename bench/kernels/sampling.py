"""Sampling of one decode step: 128 rows over a vocabulary of 152 thousand tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tandem.bench.kernels.cases import Case, measure_groups, mismatch
from tandem.bench.kernels.figures import Goal, Measurement
from tandem.bench.kernels.timing import Call, Setting
from tandem.kernels.reference import sampling as sampling_twin
from tandem.kernels.sampling.launch import sample
from tandem.kernels.sampling.rows import SampledRows, SamplingRows, new_sampled_rows

NUM_ROWS, VOCAB_SIZE = 128, 151936
LOGIT_SPREAD = 2.5  # standard deviation: a nucleus of some thousands of tokens
GOAL = Goal(3.0, 2.0)  # passes over the logits
# The kernel's sums and the twin's are rounded differently: a draw at the very edge of two tokens
# may fall to either.
ERROR_BOUND = 0.02


@dataclass(frozen=True, slots=True)
class Way:
    """How every row of a batch is sampled."""

    name: str
    label: str
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    num_top_logprobs: int = 0
    goal: Goal | None = None


WAYS = (
    Way("top_k_top_p", "top-k 50 + top-p 0.9", top_k=50, top_p=0.9, goal=GOAL),
    Way("greedy", "greedy", temperature=0.0),
    Way("temperature", "temperature only"),
    Way("top_p", "top-p 0.9 only", top_p=0.9),
    Way("min_p", "min-p 0.05", min_p=0.05),
    Way("logprobs", "top-k 50 + top-p 0.9, 5 logprobs", 0.8, 50, 0.9, 0.0, 5),
)


def run(setting: Setting) -> Iterator[Measurement]:
    groups = [sampling] if setting.is_dry else [sampling, sampling_of_float32]
    yield from measure_groups(groups, setting)


def sampling(setting: Setting) -> Sequence[Case]:
    """Of logits as a model gives them."""
    logits = _logits(setting, setting.dtype)
    return [sampling_case(way, logits, setting) for way in WAYS]


def sampling_of_float32(setting: Setting) -> Sequence[Case]:
    return [sampling_case(WAYS[0], _logits(setting, torch.float32), setting)]


def top_k_top_p_case(setting: Setting, vocab_size: int) -> Case:
    """The case with a target, over another vocabulary."""
    return sampling_case(WAYS[0], _logits(setting, setting.dtype, vocab_size), setting)


def sampling_case(way: Way, logits: torch.Tensor, setting: Setting) -> Case:
    """`logits` [num_sets, num_rows, vocab_size]; a pass is one reading of a set at the ceiling."""
    num_sets, num_rows, _ = logits.shape
    rows = _rows(way, num_rows, setting) if way.temperature > 0 else None
    out = _room(way, num_rows, setting)
    logprob_rows = None
    if way.num_top_logprobs:
        logprob_rows = torch.arange(num_rows, dtype=torch.int32, device=setting.device)

    def launch(index: int, config: Any) -> None:
        sample(logits[index], rows, out, logprob_rows=logprob_rows, config=config)

    def check(run: Call) -> float:
        expected = _room(way, num_rows, setting)
        sampling_twin.sample(logits[0].clone(), rows, expected, logprob_rows=logprob_rows)
        out.token_ids.fill_(-2)
        out.logprobs.fill_(float("nan"))
        run()
        if not bool(out.logprobs.isfinite().all()):
            return float("inf")
        return mismatch(out.token_ids, expected.token_ids)

    kind = str(logits.dtype).removeprefix("torch.")
    return Case(
        name=f"sampling_{way.name}_{kind}",
        label=f"sampling B{num_rows}, {way.label}, {kind}",
        unit="passes",
        work=float(logits[0].nbytes),
        rate="read",
        launch=launch,
        num_sets=num_sets,
        check=check,
        error_bound=ERROR_BOUND,
        goal=way.goal,
    )


def _logits(setting: Setting, dtype: torch.dtype, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    num_rows, vocab_size = setting.size(NUM_ROWS, 3), setting.size(vocab_size, 300)
    num_sets = setting.num_sets(num_rows * vocab_size * dtype.itemsize)
    shape = (num_sets, num_rows, vocab_size)
    return torch.randn(shape, dtype=dtype, device=setting.device).mul_(LOGIT_SPREAD)


def _rows(way: Way, num_rows: int, setting: Setting) -> SamplingRows:
    device = setting.device
    return SamplingRows(
        temperatures=torch.full((num_rows,), way.temperature, device=device),
        top_ks=torch.full((num_rows,), way.top_k, device=device),
        top_ps=torch.full((num_rows,), way.top_p, device=device),
        min_ps=torch.full((num_rows,), way.min_p, device=device),
        seeds=torch.arange(num_rows, device=device),
        positions=torch.arange(num_rows, device=device) + 100,
    )


def _room(way: Way, num_rows: int, setting: Setting) -> SampledRows:
    num_logprob_rows = num_rows if way.num_top_logprobs else 0
    return new_sampled_rows(num_rows, num_logprob_rows, way.num_top_logprobs, setting.device)
