"""Sampling of one decode step: 128 rows over a vocabulary of 152 thousand tokens."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tandem.bench.kernels.cases import Call, Case, measure_groups, mismatch, relative_error
from tandem.bench.report.figures import Figure, Target, at_least
from tandem.bench.report.setting import Setting
from tandem.kernels.reference import sampling as sampling_reference
from tandem.kernels.sampling.launch import sample
from tandem.kernels.sampling.rows import SampledRows, SamplingRows, new_sampled_rows

NUM_ROWS, VOCAB_SIZE = 128, 151936
LOGIT_SPREAD = 2.5  # standard deviation: a nucleus of some thousands of tokens
TARGET = at_least(1 / 3, 1 / 2, "share")  # of reading the logits once at the read ceiling
# The kernel and the reference round their sums differently: a draw at the very edge of two tokens
# may fall to either.
ERROR_BOUND = 0.02
LOGPROB_BOUND = 1e-4  # of the norm


@dataclass(frozen=True, slots=True)
class Method:
    """A method of sampling, for every row of a batch."""

    name: str
    label: str
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    num_top_logprobs: int = 0
    target: Target | None = None


METHODS = (
    Method("top_k_top_p", "top-k 50 + top-p 0.9", top_k=50, top_p=0.9, target=TARGET),
    Method("greedy", "greedy", temperature=0.0),
    Method("temperature", "temperature only"),
    Method("top_p", "top-p 0.9 only", top_p=0.9),
    Method("min_p", "min-p 0.05", min_p=0.05),
    Method("logprobs", "top-k 50 + top-p 0.9, 5 logprobs", 0.8, 50, 0.9, 0.0, 5),
)


def run(setting: Setting) -> Iterator[Figure]:
    groups = {"sampling": sampling}
    if not setting.is_dry:
        groups["sampling of float32"] = sampling_of_float32
    yield from measure_groups(groups, setting)


def sampling(setting: Setting) -> Sequence[Case]:
    """Return all methods over logits in the dtype of a model."""
    logits = _logits(setting, setting.dtype)
    return [sampling_case(method, logits, setting) for method in METHODS]


def sampling_of_float32(setting: Setting) -> Sequence[Case]:
    return [sampling_case(METHODS[0], _logits(setting, torch.float32), setting)]


def top_k_top_p_case(setting: Setting, vocab_size: int) -> Case:
    """Return the case with a target, over another vocabulary."""
    return sampling_case(METHODS[0], _logits(setting, setting.dtype, vocab_size), setting)


def sampling_case(method: Method, logits: torch.Tensor, setting: Setting) -> Case:
    """Return the case of a method over `logits` [num_sets, num_rows, vocab_size]."""
    num_sets, num_rows, _ = logits.shape
    rows = _rows(method, num_rows, setting) if method.temperature > 0 else None
    out = _room(method, num_rows, setting)
    logprob_rows = None
    if method.num_top_logprobs:
        logprob_rows = torch.arange(num_rows, dtype=torch.int32, device=setting.device)

    def launch(index: int, config: Any) -> None:
        sample(logits[index], rows, out, logprob_rows=logprob_rows, config=config)

    def check(run: Call) -> float:
        expected = _room(method, num_rows, setting)
        sampling_reference.sample(logits[0].clone(), rows, expected, logprob_rows=logprob_rows)
        out.token_ids.fill_(-2)
        out.logprobs.fill_(float("nan"))
        run()
        values = out.logprobs, out.top_logprobs
        if not all(bool(each.isfinite().all()) for each in values) or (
            logprob_rows is not None
            and relative_error(out.top_logprobs, expected.top_logprobs) > LOGPROB_BOUND
        ):
            return math.inf
        return mismatch(out.token_ids, expected.token_ids)

    kind = str(logits.dtype).removeprefix("torch.")
    return Case(
        name=f"sampling_{method.name}_{kind}",
        label=f"sampling B{num_rows}, {method.label}, {kind}",
        work=float(logits[0].nbytes),
        launch=launch,
        num_sets=num_sets,
        check=check,
        error_bound=ERROR_BOUND,
        target=method.target,
    )


def _logits(setting: Setting, dtype: torch.dtype, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    num_rows, vocab_size = setting.size(NUM_ROWS, 3), setting.size(vocab_size, 300)
    num_sets = setting.num_sets(num_rows * vocab_size * dtype.itemsize)
    shape = (num_sets, num_rows, vocab_size)
    return torch.randn(shape, dtype=dtype, device=setting.device).mul_(LOGIT_SPREAD)


def _rows(method: Method, num_rows: int, setting: Setting) -> SamplingRows:
    device = setting.device
    return SamplingRows(
        temperatures=torch.full((num_rows,), method.temperature, device=device),
        top_ks=torch.full((num_rows,), method.top_k, device=device),
        top_ps=torch.full((num_rows,), method.top_p, device=device),
        min_ps=torch.full((num_rows,), method.min_p, device=device),
        seeds=torch.arange(num_rows, device=device),
        positions=torch.arange(num_rows, device=device) + 100,
    )


def _room(method: Method, num_rows: int, setting: Setting) -> SampledRows:
    num_logprob_rows = num_rows if method.num_top_logprobs else 0
    return new_sampled_rows(num_rows, num_logprob_rows, method.num_top_logprobs, setting.device)
