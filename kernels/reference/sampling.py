"""The PyTorch reference implementation of tandem.kernels.sampling.launch: a CPU's sampler."""

import numpy as np
import torch

from tandem.kernels.sampling.rows import (
    LARGEST_LOGIT,
    LEAST_TEMPERATURE,
    NO_TOKEN,
    SampledRows,
    SamplingRows,
    TokenAdjustments,
    uniform,
)

NUM_RANKED = 128  # candidates ranked at first


def sample(
    logits: torch.Tensor,  # [num_rows, vocab_size]
    rows: SamplingRows | None,
    out: SampledRows,
    *,
    adjustments: TokenAdjustments | None = None,
    logprob_rows: torch.Tensor | None = None,  # int [num_logprob_rows]
) -> None:
    """Draw one token per row of `logits`, which change while this runs and are restored after it.

    Without `rows` all are greedy, and none has adjustments.
    `logprob_rows` are the rows that `out` has log-probabilities for: of the row's token and of
    its `num_top` likeliest, by the raw logits. A row gets NO_TOKEN when its best adjusted logit
    is not finite or when one is NaN; its log-probabilities then mean nothing.

    Masses are float32 probabilities cumulated in float64 here, and fixed-point integers in the
    kernel: the results may differ where a draw falls within 1e-5 of the edge between two tokens, or
    of a filter.
    """
    if not len(logits):
        return
    values = logits.float()
    raw = None
    if logprob_rows is not None and len(logprob_rows):
        raw = values[logprob_rows].log_softmax(-1)
    if adjustments is None or rows is None:
        out.token_ids.copy_(_token_ids(values, rows))
    else:
        places = _entry_places(adjustments)
        _, entry_rows, ids = places
        before = values[entry_rows, ids]
        values[entry_rows, ids] = _adjusted(before, rows.positions, adjustments, places)
        out.token_ids.copy_(_token_ids(values, rows))
        values[entry_rows, ids] = before
    if raw is not None:
        assert logprob_rows is not None
        _write_logprobs(raw, out.token_ids[logprob_rows], out)


def token_logprobs(
    logits: torch.Tensor,  # [num_rows, vocab_size]
    out: SampledRows,
) -> None:
    """Write the log-probabilities of each row of `logits` for the token ids in `out`."""
    _write_logprobs(logits.float().log_softmax(-1), out.token_ids, out)


def _entry_places(adjustments: TokenAdjustments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return index, row and token id of every entry that belongs to a row."""
    lengths = adjustments.lengths.to(torch.int64)
    ends = lengths.cumsum(0)
    num_rows = torch.arange(len(lengths), device=lengths.device)
    entry_rows = num_rows.repeat_interleave(lengths)
    ordinals = torch.arange(len(entry_rows), device=lengths.device) - (ends - lengths)[entry_rows]
    entries = adjustments.starts[entry_rows] + ordinals
    return entries, entry_rows, adjustments.token_ids[entries].to(torch.int64)


def _adjusted(
    values: torch.Tensor,  # [num_placed]
    positions: torch.Tensor,  # [num_rows]
    adjustments: TokenAdjustments,
    places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    entries, rows, _ = places
    times = adjustments.times[entries]
    repetition = adjustments.repetition_penalties[rows]
    penalized = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(times >= 0, penalized, values)
    cost = times * adjustments.frequency_penalties[rows] + adjustments.presence_penalties[rows]
    values = torch.where(times > 0, values - cost, values)
    values = values + adjustments.biases[entries]
    held = adjustments.held[entries] & (positions < adjustments.held_until)[rows]
    return values.masked_fill_(held, float("-inf"))


def _token_ids(values: torch.Tensor, rows: SamplingRows | None) -> torch.Tensor:
    """Return [num_rows], NO_TOKEN where the best logit is not finite."""
    token_ids = _likeliest(values)
    best = values.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    is_drawn = best.abs() < LARGEST_LOGIT  # false of a NaN, which argmax puts above all else
    if rows is not None:
        drawn = [row for row, one in enumerate(rows.temperatures.tolist()) if one > 0]
        if len(drawn) == len(values):
            token_ids = _draw(values, rows)
        elif drawn:
            index = torch.tensor(drawn, device=values.device)
            token_ids[index] = _draw(values[index], _select(rows, index))
        is_drawn &= token_ids < values.shape[-1]  # a row of no mass has no token either
    return torch.where(is_drawn, token_ids, NO_TOKEN)


def _likeliest(values: torch.Tensor) -> torch.Tensor:
    """Return the token id of the largest value of each row, of equals the lowest.

    On a CPU by NumPy: torch takes up to ten times as long, and its `max` wakes a team of threads
    even for two short rows.
    """
    if values.device.type == "cpu":
        return torch.from_numpy(values.numpy().argmax(-1))
    return values.argmax(-1)


def _select(rows: SamplingRows, index: torch.Tensor) -> SamplingRows:
    return SamplingRows(
        rows.temperatures[index],
        rows.top_ks[index],
        rows.top_ps[index],
        rows.min_ps[index],
        rows.seeds[index],
        rows.positions[index],
    )


def _draw(values: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Invert the CDF of every row's filtered distribution at its (seed, position)."""
    probs = (values / rows.temperatures.clamp(min=LEAST_TEMPERATURE).unsqueeze(1)).softmax(-1)
    filters = zip(rows.top_ks.tolist(), rows.top_ps.tolist(), rows.min_ps.tolist(), strict=True)
    filtered = [row for row, (k, p, least) in enumerate(filters) if k > 0 or p < 1 or least > 0]
    if len(filtered) == len(probs):
        probs = torch.where(probs >= _thresholds(probs, rows), probs, 0.0)
    elif filtered:
        index = torch.tensor(filtered, device=probs.device)
        part = probs[index]
        probs[index] = torch.where(part >= _thresholds(part, _select(rows, index)), part, 0.0)
    # Cumulated in float64: a large vocabulary's tail is below float32's rounding.
    cdf = probs.cumsum(-1, dtype=torch.float64)
    pairs = zip(rows.seeds.tolist(), rows.positions.tolist(), strict=True)
    u = torch.tensor([uniform(*pair) for pair in pairs], dtype=cdf.dtype, device=cdf.device)
    # The first token whose cumulated mass is above the point; never one of no mass.
    return torch.searchsorted(cdf, u.unsqueeze(1) * cdf[:, -1:], right=True).squeeze(1)


def _thresholds(
    probs: torch.Tensor, rows: SamplingRows, num_ranked: int = NUM_RANKED
) -> torch.Tensor:
    """Return [num_rows, 1], the least probability that survives min-p, top-k and top-p, in order.

    Ranks the `num_ranked` likeliest tokens, and more of them for the rows where those are too few.
    """
    vocab_size = probs.shape[-1]
    top_ks = rows.top_ks.tolist()
    num_ranked = min(vocab_size, max(num_ranked, *top_ks))
    ranked = _largest(probs, num_ranked)
    least, kept = torch.zeros(len(probs), 1, device=probs.device), probs
    if any(top_ks) or any(rows.min_ps.tolist()):
        top_k = rows.top_ks.to(torch.int64).unsqueeze(1)
        is_ranked = (top_k > 0) & (top_k < vocab_size)
        kth = ranked.gather(-1, (top_k - 1).clamp(0, num_ranked - 1)) * is_ranked
        least = torch.maximum(kth, ranked[:, :1] * rows.min_ps.unsqueeze(1))
        kept = torch.where(probs >= least, probs, 0.0)
    if not any(top_p < 1 for top_p in rows.top_ps.tolist()):
        return least
    top_p = rows.top_ps.unsqueeze(1)
    is_nucleus = top_p < 1
    wanted = top_p * kept.sum(-1, keepdim=True)
    # A token is in the nucleus when those before it have not reached top_p; the best always is.
    cumulated = ranked.cumsum(-1, dtype=torch.float64)
    num_kept = (cumulated - ranked < wanted).sum(-1, keepdim=True).clamp_(min=1)
    nucleus = torch.maximum(ranked.gather(-1, num_kept - 1), least)
    thresholds = torch.where(is_nucleus, nucleus, least)
    is_short = cumulated[:, -1:] < wanted
    if num_ranked < vocab_size and is_short.any():
        too_few = is_short & is_nucleus & (ranked[:, -1:] >= least)
        again = too_few.squeeze(1).nonzero().squeeze(1)
        if len(again):
            rest = _thresholds(probs[again], _select(rows, again), 8 * num_ranked)
            thresholds[again] = rest
    return thresholds


def _largest(probs: torch.Tensor, count: int) -> torch.Tensor:
    """Return [num_rows, count], the largest values of each row in descending order.

    On a CPU by NumPy: torch takes up to ten times as long.
    """
    if probs.device.type != "cpu":
        return probs.topk(count).values
    largest = np.partition(probs.numpy(), -count, -1)[:, -count:]
    largest.sort(-1)
    return torch.from_numpy(largest).flip(-1)


def _write_logprobs(raw: torch.Tensor, token_ids: torch.Tensor, out: SampledRows) -> None:
    chosen = raw.gather(-1, token_ids.clamp(min=0).unsqueeze(1))
    out.logprobs.copy_(chosen.squeeze(1))
    num_top = out.top_ids.shape[1]
    if not num_top:
        return
    values, ids = raw.topk(min(num_top + 1, raw.shape[-1]))
    if values.shape[1] > num_top:
        # Of equals at the end topk takes any.
        index = (values[:, -1] == values[:, -2]).nonzero().squeeze(1)
        values, ids = values[:, :num_top], ids[:, :num_top]
        if len(index):
            ranked, order = raw[index].sort(dim=-1, descending=True, stable=True)
            values[index], ids[index] = ranked[:, :num_top], order[:, :num_top]
    by_id = ids.argsort(-1)
    values, ids = values.gather(-1, by_id), ids.gather(-1, by_id)
    by_value = values.argsort(dim=-1, descending=True, stable=True)
    out.top_logprobs.copy_(values.gather(-1, by_value))
    out.top_ids.copy_(ids.gather(-1, by_value))
