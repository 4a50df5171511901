"""From rows of logits to tokens: the sequences' parameters as tensors, and the kernel's results.

A row passes through penalties, logit bias and min_tokens; then argmax at temperature 0, otherwise
temperature, min-p, top-k, top-p and the draw, which depends on (seed, position) and nothing else.
Log-probabilities are of the raw logits, before all of these, as OpenAI and vLLM report them; under
a grammar the tokens that it does not allow are removed before anything else. Ties
at the edge of a filter are all kept, and the inverse CDF runs in the order of token ids, so that
rounding noise in the logits moves the edges of a draw and never the order of the candidates.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat

import torch

from tandem.engine.batch.masks import MaskedRows, begin_masks
from tandem.engine.batch.rows import ADJUSTS, DRAWS, FOLLOWS_GRAMMAR, WANTS_LOGPROBS, BatchRows
from tandem.engine.batch.upload import download, upload
from tandem.engine.schedule.sequence import Chunk
from tandem.engine.step.outcome import SampledToken, UndrawnError
from tandem.engine.step.token_adjustments import AdjustedRows, adjusted_tokens
from tandem.kernels.sampling.rows import NO_TOKEN, SampledRows, new_sampled_rows
from tandem.runtime.errors import InternalError, TandemError
from tandem.runtime.wire.messages import TokenLogprobs


@dataclass(slots=True, frozen=True)
class SamplingPlan:
    """The sampling of one step's rows, as far as BatchRows does not hold it."""

    is_greedy: bool
    adjusted: AdjustedRows | None
    num_tops: dict[int, int]  # row |-> likeliest tokens wanted, for rows that want logprobs
    masked: MaskedRows | None = None

    @property
    def is_plain(self) -> bool:
        """True when BatchRows holds all parameters."""
        return self.adjusted is None and not self.num_tops and self.masked is None


GREEDY = SamplingPlan(True, None, {})
DRAWN = SamplingPlan(False, None, {})


class Sampler:
    """Samples batches of one model; min_tokens holds `eos_token_ids` back.

    `sample` and `mask_logits` are those of tandem.kernels.sampling, or others with their contracts.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        sample: Callable[..., None],
        mask_logits: Callable[..., None],
        table: BatchRows,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._sample = sample
        self._mask_logits = mask_logits
        self._table = table

    def plan(self, rows: list[Chunk], num_chunks: int) -> SamplingPlan:
        """Plan the sampling of the last tokens of `rows`, whose changes have been taken.

        Masks are begun here, and waited for by `sample`. `num_chunks` are all of the step.
        """
        needs = self._table.needs(row.seq for row in rows)
        if not needs & (ADJUSTS | WANTS_LOGPROBS | FOLLOWS_GRAMMAR):
            return DRAWN if needs & DRAWS else GREEDY
        masked = None
        if needs & FOLLOWS_GRAMMAR:
            masked = begin_masks(rows, self._eos_token_ids, num_chunks)
        adjusted = self._adjusted(rows) if needs & ADJUSTS else None
        num_tops: dict[int, int] = {}
        if needs & WANTS_LOGPROBS:
            asked = {i: row.seq.sampling.logprobs for i, row in enumerate(rows)}
            num_tops = {i: min(n, self._vocab_size) for i, n in asked.items() if n is not None}
        is_greedy = adjusted is None and not needs & DRAWS
        return SamplingPlan(is_greedy, adjusted, num_tops, masked)

    def _adjusted(self, rows: list[Chunk]) -> AdjustedRows | None:
        adjusted = AdjustedRows()
        for row in rows:
            tokens = adjusted_tokens(row.seq, self._vocab_size, self._eos_token_ids)
            adjusted.add(row, tokens)
        return adjusted if adjusted.token_ids else None

    def sample(
        self,
        logits: torch.Tensor,  # [num_rows, vocab_size]
        batch_rows: torch.Tensor,  # [num_rows]
        positions: torch.Tensor,  # [num_rows] where the tokens will stand
        plan: SamplingPlan,
    ) -> SampledRows:
        """Draw one token per row, kept for its batch row too; `logits` become scratch.

        Waits for masks, and never for the device.
        """
        device, num_tops = logits.device, plan.num_tops
        out = new_sampled_rows(
            logits.shape[0], len(num_tops), max(num_tops.values(), default=0), device
        )
        if plan.masked is not None and (masks := plan.masked.tensors(device)) is not None:
            self._mask_logits(logits, masks)
        adjustments = logprob_rows = None
        if plan.adjusted is not None:
            adjustments = plan.adjusted.tensors(self._table)
        if num_tops:
            [logprob_rows] = upload([array("q", num_tops)], device)
        self._sample(
            logits,
            None if plan.is_greedy else self._table.sampling_rows(batch_rows, positions),
            out,
            adjustments=adjustments,
            logprob_rows=logprob_rows,
        )
        self._table.drawn.index_copy_(0, batch_rows, out.token_ids)
        return out


class HostTokens:
    """A step's tokens, copied to the host; valid once the step has happened."""

    def __init__(self, rows: list[Chunk], sampled: SampledRows, plan: SamplingPlan) -> None:
        self._rows = rows
        self._num_tops = plan.num_tops
        self._masked = plan.masked
        self._token_ids = download(sampled.token_ids)
        self._logprobs: tuple[torch.Tensor, ...] = ()
        if plan.num_tops:
            columns = (sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
            self._logprobs = tuple(download(column) for column in columns)

    def read(self) -> list[SampledToken]:
        """Return one token per row. Raises UndrawnError when a row drew none."""
        token_ids: list[int] = self._token_ids.tolist()
        if not self._num_tops:
            tokens = list(map(SampledToken, token_ids, repeat(None)))
        else:
            found = self._read_logprobs()
            tokens = [SampledToken(token_id, found.get(i)) for i, token_id in enumerate(token_ids)]
        if NO_TOKEN in token_ids or (self._masked is not None and self._masked.undrawn):
            raise UndrawnError(tokens, self._reasons(token_ids))
        return tokens

    def _reasons(self, token_ids: list[int]) -> dict[int, TandemError | None]:
        """Return the rows without a token, each with its error; None: it waits for its mask."""
        reasons: dict[int, TandemError | None] = {
            row: InternalError(
                f"logits are not finite for request {self._rows[row].seq.request_id}"
            )
            for row, token_id in enumerate(token_ids)
            if token_id == NO_TOKEN
        }
        return reasons if self._masked is None else reasons | self._masked.undrawn

    def _read_logprobs(self) -> dict[int, TokenLogprobs]:
        columns = [column.tolist() for column in self._logprobs]
        found: dict[int, TokenLogprobs] = {}
        for (row, num_top), logprob, ids, values in zip(
            self._num_tops.items(), *columns, strict=True
        ):
            pairs = zip(ids[:num_top], values[:num_top], strict=True)
            top = [pair for pair in pairs if pair[1] > float("-inf")]  # those that are allowed
            found[row] = TokenLogprobs(logprob=logprob, top=top)
        return found
