"""Drawing tokens from logits, so that a draw depends on (seed, position) and nothing else.

One row's pipeline: penalties, logit bias, min_tokens; then argmax at temperature 0, otherwise
temperature, min-p, top-k, top-p and the draw. Log-probabilities are of the raw logits, before all
of these, as OpenAI and vLLM report them. Ties at the edge of a filter are all kept, and the
inverse CDF runs in the order of token ids, so that rounding noise in the logits moves the edges
of a draw and never the order of the candidates.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tandem.engine.sequence import Sequence
from tandem.runtime.errors import InternalError
from tandem.runtime.messages import SamplingParams, TokenLogprobs

LEAST_TEMPERATURE = 1e-6  # below it a draw is greedy in float32, and logits would overflow
NUM_RANKED = 128  # candidates ranked at first

_MASK = 2**64 - 1


@dataclass(slots=True, frozen=True)
class SampledToken:
    """One drawn token; `logprobs` where the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(slots=True, frozen=True)
class SampleRow:
    """Whose token a row of logits gives, and at which index of `seq.token_ids` it will stand."""

    seq: Sequence
    position: int


def uniform(seed: int, position: int) -> float:
    """In [0, 1): 52 bits of SplitMix64 (Steele, Lea, Flood 2014) over seed, then position."""
    return (_mix(_mix(seed & _MASK) ^ position) >> 12) / 2**52


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Sampler:
    """Samples batches of one model; `eos_token_ids` are what min_tokens holds back."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    def sample(self, logits: torch.Tensor, rows: list[SampleRow]) -> list[SampledToken]:
        """One token per row of `logits` [num_rows, vocab_size], which is overwritten.

        Raises InternalError when a row has no finite best logit.
        """
        if not rows:
            return []
        logits = logits.float()
        logprob_rows = [i for i, row in enumerate(rows) if row.seq.sampling.logprobs is not None]
        raw = logits[logprob_rows].log_softmax(-1) if logprob_rows else None
        for index, row in enumerate(rows):
            if _is_adjusted(row.seq):
                self._adjust_inplace(logits[index], row.seq)
        token_ids = _best(logits)
        drawn = [i for i, row in enumerate(rows) if row.seq.sampling.temperature > 0]
        if drawn:
            part = logits if len(drawn) == len(rows) else logits[drawn]
            for index, token_id in zip(drawn, _draw(part, [rows[i] for i in drawn]), strict=True):
                token_ids[index] = token_id
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if raw is not None:
            for index, raw_row in zip(logprob_rows, raw, strict=True):
                num_top = rows[index].seq.sampling.logprobs or 0
                logprobs[index] = _token_logprobs(raw_row, token_ids[index], num_top)
        return [SampledToken(*pair) for pair in zip(token_ids, logprobs, strict=True)]

    def _adjust_inplace(self, logits: torch.Tensor, seq: Sequence) -> None:
        params = seq.sampling
        if params.repetition_penalty != 1:
            seen = _index(set(seq.token_ids), logits)
            values = logits[seen]
            penalty = params.repetition_penalty
            logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if params.frequency_penalty or params.presence_penalty:
            counts = Counter(seq.token_ids[seq.num_prompt_tokens :])
            times = torch.tensor(list(counts.values()), dtype=torch.float32, device=logits.device)
            cost = times * params.frequency_penalty + params.presence_penalty
            logits[_index(counts, logits)] -= cost
        if params.logit_bias:
            bias = {t: b for t, b in params.logit_bias.items() if 0 <= t < self._vocab_size}
            added = torch.tensor(list(bias.values()), dtype=torch.float32, device=logits.device)
            logits[_index(bias, logits)] += added
        if seq.num_generated_tokens < seq.stop.min_tokens:
            held_back = set(seq.stop.stop_token_ids)
            if not seq.stop.ignore_eos:
                held_back.update(self._eos_token_ids)
            held_back = {t for t in held_back if 0 <= t < self._vocab_size}
            logits[_index(held_back, logits)] = float("-inf")


def _is_adjusted(seq: Sequence) -> bool:
    params = seq.sampling
    return (
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
        or bool(params.logit_bias)
        or seq.num_generated_tokens < seq.stop.min_tokens
    )


def _best(logits: torch.Tensor) -> list[int]:
    values, token_ids = logits.max(-1)
    best: list[float] = values.tolist()
    # NaN compares false, and max puts it above all else.
    if not all(-3e38 < value < 3e38 for value in best):
        raise InternalError(f"logits are not finite: the best of each row are {best}")
    result: list[int] = token_ids.tolist()
    return result


def _index(token_ids: Iterable[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64, device=logits.device)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _draw(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    """Inverse CDF of every row's filtered distribution at its (seed, position)."""
    temperatures = [max(row.seq.sampling.temperature, LEAST_TEMPERATURE) for row in rows]
    probs = (logits / _column(temperatures, logits)).softmax(-1)
    filtered = [i for i, row in enumerate(rows) if _is_filtered(row.seq.sampling)]
    if filtered:
        part = probs if len(filtered) == len(rows) else probs[filtered]
        part = part * (part >= _thresholds(part, [rows[i].seq.sampling for i in filtered]))
        if len(filtered) == len(rows):
            probs = part
        else:
            probs[filtered] = part
    # Cumulated in float64: a large vocabulary's tail is below float32's rounding.
    cdf = probs.cumsum(-1, dtype=torch.float64)
    u = _column([uniform(row.seq.sampling.seed, row.position) for row in rows], cdf)
    # The first token whose cumulated mass is above the point; never one of no mass.
    drawn: list[int] = torch.searchsorted(cdf, u * cdf[:, -1:], right=True).squeeze(1).tolist()
    return drawn


def _thresholds(
    probs: torch.Tensor, params: list[SamplingParams], num_ranked: int = NUM_RANKED
) -> torch.Tensor:
    """[num_rows, 1]: the least probability that survives min-p, top-k and top-p, in this order.

    Looks at the `num_ranked` likeliest, and at more of them for the rows where that is too few.
    """
    vocab_size = probs.shape[-1]
    num_ranked = min(vocab_size, max(num_ranked, *(p.top_k for p in params)))
    ranked = probs.topk(num_ranked).values
    ranks = [p.top_k - 1 if 0 < p.top_k < vocab_size else vocab_size for p in params]
    rank = torch.tensor(ranks, device=probs.device).unsqueeze(1)
    kth = ranked.gather(-1, rank.clamp(max=num_ranked - 1)) * (rank < vocab_size)
    least = torch.maximum(kth, ranked[:, :1] * _column([p.min_p for p in params], probs))
    if all(p.top_p >= 1 for p in params):
        return least
    top_p = _column([p.top_p for p in params], probs)
    wanted = top_p * (probs * (probs >= least)).sum(-1, keepdim=True)
    # A token is in the nucleus when those before it have not reached top_p; the best always is.
    cumulated = ranked.cumsum(-1, dtype=torch.float64)
    num_kept = (cumulated - ranked < wanted).sum(-1, keepdim=True).clamp_(min=1)
    nucleus = torch.maximum(ranked.gather(-1, num_kept - 1), least)
    thresholds = torch.where(top_p < 1, nucleus, least)
    if num_ranked < vocab_size:
        too_few = (top_p < 1) & (cumulated[:, -1:] < wanted) & (ranked[:, -1:] >= least)
        again: list[int] = too_few.squeeze(1).nonzero().squeeze(1).tolist()
        if again:
            rest = _thresholds(probs[again], [params[i] for i in again], 8 * num_ranked)
            thresholds[again] = rest
    return thresholds


def _token_logprobs(raw: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    values, ids = raw.topk(min(num_top, raw.shape[-1]))
    top = sorted(
        zip(ids.tolist(), values.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0])
    )
    return TokenLogprobs(logprob=raw[token_id].item(), top=top)
