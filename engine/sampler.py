"""From rows of logits to tokens: what each sequence asks for, as tensors, and the kernel's answer.

One row's pipeline: penalties, logit bias, min_tokens; then argmax at temperature 0, otherwise
temperature, min-p, top-k, top-p and the draw, which depends on (seed, position) and nothing else.
Log-probabilities are of the raw logits, before all of these, as OpenAI and vLLM report them. Ties
at the edge of a filter are all kept, and the inverse CDF runs in the order of token ids, so that
rounding noise in the logits moves the edges of a draw and never the order of the candidates.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tandem.engine.sequence import Sequence
from tandem.kernels.sampling_rows import (
    NO_TOKEN,
    SampledRows,
    SamplingRows,
    TokenAdjustments,
    new_sampled_rows,
)
from tandem.runtime.errors import InternalError
from tandem.runtime.messages import TokenLogprobs

NOWHERE = -1  # how often a token was generated that is in neither prompt nor answer


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


class Sampler:
    """Samples batches of one model; `eos_token_ids` are what min_tokens holds back.

    `sample` is tandem.kernels.sampling's, or its twin's.
    """

    def __init__(
        self, vocab_size: int, eos_token_ids: tuple[int, ...], sample: Callable[..., None]
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._sample = sample

    def sample(self, logits: torch.Tensor, rows: list[SampleRow]) -> list[SampledToken]:
        """One token per row of `logits` [num_rows, vocab_size], which are scratch from then on.

        Raises InternalError when a row has no finite best logit.
        """
        if not rows:
            return []
        device = logits.device
        entries = self._entries(rows)
        is_plain = not entries.token_ids and all(r.seq.sampling.temperature <= 0 for r in rows)
        asked = {i: row.seq.sampling.logprobs for i, row in enumerate(rows)}
        num_tops = {i: min(num, self._vocab_size) for i, num in asked.items() if num is not None}
        out = new_sampled_rows(len(rows), len(num_tops), max(num_tops.values(), default=0), device)
        self._sample(
            logits,
            None if is_plain else _sampling_rows(rows, device),
            out,
            adjustments=entries.tensors(rows, device) if entries.token_ids else None,
            logprob_rows=torch.tensor([*num_tops], device=device) if num_tops else None,
        )
        token_ids: list[int] = out.token_ids.tolist()
        if NO_TOKEN in token_ids:
            bad = [row.seq.request_id for row, t in zip(rows, token_ids, strict=True) if t < 0]
            raise InternalError(f"logits are not finite, of {', '.join(bad)}")
        logprobs = _logprobs(out, num_tops) if num_tops else {}
        return [SampledToken(token_id, logprobs.get(i)) for i, token_id in enumerate(token_ids)]

    def _entries(self, rows: list[SampleRow]) -> "_Entries":
        entries = _Entries()
        for row in rows:
            entries.add(self._adjusted(row.seq))
        return entries

    def _adjusted(self, seq: Sequence) -> dict[int, "_Entry"]:
        """The tokens whose logits change before `seq` draws its next one."""
        params, changed = seq.sampling, {}
        if params.repetition_penalty != 1:
            changed = dict.fromkeys(seq.token_ids, _Entry(times=0))
        if params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty:
            generated = Counter(seq.token_ids[seq.num_prompt_tokens :])
            changed |= {token_id: _Entry(times) for token_id, times in generated.items()}
        for token_id, bias in (params.logit_bias or {}).items():
            if 0 <= token_id < self._vocab_size:
                changed[token_id] = changed.get(token_id, _Entry())._replace(bias=bias)
        if seq.num_generated_tokens < seq.stop.min_tokens:
            held = {*seq.stop.stop_token_ids, *(() if seq.stop.ignore_eos else self._eos_token_ids)}
            for token_id in held:
                if 0 <= token_id < self._vocab_size:
                    changed[token_id] = changed.get(token_id, _Entry())._replace(is_held=True)
        return changed


class _Entry(NamedTuple):
    times: int = NOWHERE
    bias: float = 0.0
    is_held: bool = False


@dataclass(slots=True)
class _Entries:
    """TokenAdjustments in the making, one row after another."""

    lengths: list[int] = field(default_factory=list)  # per row
    token_ids: list[int] = field(default_factory=list)
    entries: list[_Entry] = field(default_factory=list)  # per token id

    def add(self, changed: dict[int, _Entry]) -> None:
        self.lengths.append(len(changed))
        self.token_ids += changed.keys()
        self.entries += changed.values()

    def tensors(self, rows: list[SampleRow], device: torch.device) -> TokenAdjustments:
        seqs = [row.seq for row in rows]
        # Where the answer will have its min_tokens, by the row's own count of positions.
        held_until = [
            row.position + row.seq.stop.min_tokens - row.seq.num_generated_tokens for row in rows
        ]
        lengths = torch.tensor(self.lengths)
        starts = lengths.cumsum(0) - lengths
        integers = torch.stack([starts, lengths, torch.tensor(held_until)]).to(device)
        penalties = torch.tensor(
            [
                [seq.sampling.repetition_penalty for seq in seqs],
                [seq.sampling.frequency_penalty for seq in seqs],
                [seq.sampling.presence_penalty for seq in seqs],
            ],
            dtype=torch.float32,
        ).to(device)
        entries = torch.tensor(
            [self.token_ids, [entry.times for entry in self.entries]], dtype=torch.int32
        ).to(device)
        return TokenAdjustments(
            starts=integers[0],
            lengths=integers[1],
            token_ids=entries[0],
            times=entries[1],
            biases=torch.tensor([entry.bias for entry in self.entries], device=device),
            held=torch.tensor([entry.is_held for entry in self.entries], device=device),
            repetition_penalties=penalties[0],
            frequency_penalties=penalties[1],
            presence_penalties=penalties[2],
            held_until=integers[2],
        )


def _sampling_rows(rows: list[SampleRow], device: torch.device) -> SamplingRows:
    params = [row.seq.sampling for row in rows]
    floats = torch.tensor(
        [
            [p.temperature for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
        ],
        dtype=torch.float32,
    ).to(device)
    integers = torch.tensor(
        [
            [p.top_k for p in params],
            [_signed(p.seed) for p in params],
            [row.position for row in rows],
        ]
    ).to(device)
    return SamplingRows(
        temperatures=floats[0],
        top_ks=integers[0],
        top_ps=floats[1],
        min_ps=floats[2],
        seeds=integers[1],
        positions=integers[2],
    )


def _signed(seed: int) -> int:
    """The int64 of the same 64 bits."""
    return ((seed + 2**63) % 2**64) - 2**63


def _logprobs(out: SampledRows, num_tops: dict[int, int]) -> dict[int, TokenLogprobs]:
    """Row |-> its log-probabilities; `num_tops` are the rows of `out` and what each asked for."""
    columns = (out.logprobs.tolist(), out.top_ids.tolist(), out.top_logprobs.tolist())
    found: dict[int, TokenLogprobs] = {}
    for (row, num_top), logprob, ids, values in zip(num_tops.items(), *columns, strict=True):
        top = list(zip(ids[:num_top], values[:num_top], strict=True))
        found[row] = TokenLogprobs(logprob=logprob, top=top)
    return found
