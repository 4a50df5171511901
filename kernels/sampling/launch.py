"""Sampling on the GPU: from logits to tokens without the host in between.

Three kernels run: the adjustment of single tokens, if there are any; a survey, the one pass over
the logits, which stores the best of every group of tokens and the mass of every chunk where a row
needs it; and the draw, one program per row, which reads single groups and chunks again. Rows whose
filters keep more tokens than a list of candidates holds are searched whole by their program. Rows
with log-probabilities are surveyed once more, unadjusted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from tandem.kernels.dependent_launch import launch_options
from tandem.kernels.sampling.candidates import GROUP
from tandem.kernels.sampling.draw import draw_kernel
from tandem.kernels.sampling.logprobs import logprobs_kernel
from tandem.kernels.sampling.rows import SampledRows, SamplingRows, TokenAdjustments
from tandem.kernels.sampling.survey import adjust_kernel, survey_kernel
from tandem.kernels.sizes import cdiv, next_power_of_2
from tandem.kernels.tuned import tuned_config

MAX_VOCAB_SIZE = 2**22  # masses have the bits that a sum of so many leaves in an int64
MAX_ROWS = 65535  # a grid's second dimension
ADJUST_TILE = 512


@dataclass(slots=True, frozen=True)
class SamplingConfig:
    """`chunk` tokens per program of the survey, `capacity` candidates per row of the draw.

    The draw goes through lists and rows in tiles of `tile`. All are powers of 2.
    """

    chunk: int = 4096
    survey_warps: int = 4
    capacity: int = 4096
    tile: int = 1024
    draw_warps: int = 8


DEFAULT_CONFIG = SamplingConfig()


def candidates(vocab_size: int, element_bytes: int) -> Iterator[SamplingConfig]:
    """Yield the configurations worth measuring."""
    # With other numbers of warps the draw spills, or is too slow over a row.
    for chunk, survey_warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 4), (8192, 8), (16384, 8)):
        if chunk * element_bytes <= 32768 and chunk < 2 * vocab_size:
            for tile in (512, 1024, 2048):
                yield SamplingConfig(chunk, survey_warps, tile=tile)


def sample(
    logits: torch.Tensor,  # [num_rows, vocab_size]
    rows: SamplingRows | None,
    out: SampledRows,
    *,
    adjustments: TokenAdjustments | None = None,
    logprob_rows: torch.Tensor | None = None,  # int [num_logprob_rows]
    config: SamplingConfig | None = None,
) -> None:
    """Draw one token per row of `logits`, which change while this runs and are restored after it.

    Without `rows` all are greedy, and none has adjustments.
    `logprob_rows` are the rows that `out` has log-probabilities for: of the row's token and of
    its `num_top` likeliest, by the raw logits. A row gets NO_TOKEN when its best adjusted logit
    is not finite or when one is NaN; its log-probabilities then mean nothing.
    """
    if _check_logits(logits, out) == 0:
        return
    config = config or _tuned(logits)
    scratch = _new_scratch(logits, config)
    entries = _Entries.unused(scratch)
    if adjustments is not None:
        assert rows is not None
        entries = _adjust_inplace(logits, rows.positions, adjustments)
    _survey(logits, rows, None, scratch, config)
    _draw(logits, rows, entries, scratch, out, config, has_entries=adjustments is not None)
    if logprob_rows is not None and len(logprob_rows):
        _write_logprobs(logits, out, logprob_rows, scratch, config)


def token_logprobs(
    logits: torch.Tensor,  # [num_rows, vocab_size]
    out: SampledRows,
) -> None:
    """Write the log-probabilities of each row of `logits` for the token ids in `out`."""
    num_rows, config = _check_logits(logits, out), _tuned(logits)
    all_rows = torch.arange(num_rows, device=logits.device)
    _write_logprobs(logits, out, all_rows, _new_scratch(logits, config), config)


def _check_logits(logits: torch.Tensor, out: SampledRows) -> int:
    num_rows, vocab_size = logits.shape
    assert num_rows <= MAX_ROWS and vocab_size <= MAX_VOCAB_SIZE and logits.stride(1) == 1
    assert out.token_ids.shape == (num_rows,) and out.token_ids.is_contiguous()
    return num_rows


def _tuned(logits: torch.Tensor) -> SamplingConfig:
    shape = {"vocab_size": logits.shape[1], "element_bytes": logits.element_size()}
    return tuned_config(DEFAULT_CONFIG, "sampling", **shape)


@dataclass(slots=True, frozen=True)
class _Scratch:
    group_best: torch.Tensor  # [num_rows, num_groups]
    group_list: torch.Tensor  # [num_rows, num_groups]
    chunk_best: torch.Tensor  # [num_rows, num_chunks]
    chunk_mass: torch.Tensor  # [num_rows, num_chunks]
    list_values: torch.Tensor  # [num_rows, capacity]
    list_ids: torch.Tensor  # [num_rows, capacity]


class _Entries(NamedTuple):
    """Tokens taken out of the logits, in the order of draw_kernel's arguments."""

    starts: torch.Tensor  # [num_rows]
    lengths: torch.Tensor  # [num_rows]
    token_ids: torch.Tensor  # int32 [num_entries]
    adjusted_values: torch.Tensor  # [num_entries]
    raw_values: torch.Tensor  # [num_entries]

    @classmethod
    def unused(cls, scratch: _Scratch) -> "_Entries":
        """Return tensors of the right types for a kernel whose flag turns entries off."""
        floats, integers = scratch.list_values, scratch.list_ids
        return cls(floats, floats, integers, floats, floats)


def _draw(
    logits: torch.Tensor,
    rows: SamplingRows | None,
    entries: _Entries,
    scratch: _Scratch,
    out: SampledRows,
    config: SamplingConfig,
    *,
    has_entries: bool,
) -> None:
    num_rows, vocab_size = logits.shape
    draw_kernel[(num_rows,)](
        logits,
        logits.stride(0),
        scratch.group_best,
        scratch.chunk_best,
        scratch.chunk_mass,
        *_row_tensors(rows, scratch.list_values),
        *entries,
        scratch.group_list,
        scratch.list_values,
        scratch.list_ids,
        out.token_ids,
        vocab_size,
        scratch.group_best.shape[1],
        scratch.chunk_best.shape[1],
        IS_GREEDY=rows is None,
        HAS_ENTRIES=has_entries,
        MASS_UNIT=2.0 ** (62 - (vocab_size - 1).bit_length()),
        CHUNK=config.chunk,
        NUM_GROUPS=next_power_of_2(scratch.group_best.shape[1]),
        NUM_CHUNKS=next_power_of_2(scratch.chunk_best.shape[1]),
        CAPACITY=config.capacity,
        TILE=config.tile,
        num_warps=config.draw_warps,
        **launch_options(),
    )


def _row_tensors(rows: SamplingRows | None, nothing: torch.Tensor) -> list[torch.Tensor]:
    return [nothing if rows is None else getattr(rows, f.name) for f in fields(SamplingRows)]


def _new_scratch(logits: torch.Tensor, config: SamplingConfig) -> _Scratch:
    num_rows, vocab_size = logits.shape
    groups = (num_rows, cdiv(vocab_size, GROUP.value))
    chunks = (num_rows, cdiv(vocab_size, config.chunk))
    listed = (num_rows, config.capacity)
    device = logits.device
    return _Scratch(
        group_best=torch.empty(groups, dtype=torch.float32, device=device),
        group_list=torch.empty(groups, dtype=torch.int32, device=device),
        chunk_best=torch.empty(chunks, dtype=torch.float32, device=device),
        chunk_mass=torch.empty(chunks, dtype=torch.float32, device=device),
        list_values=torch.empty(listed, dtype=torch.float32, device=device),
        list_ids=torch.empty(listed, dtype=torch.int32, device=device),
    )


def _adjust_inplace(
    logits: torch.Tensor, positions: torch.Tensor, adjustments: TokenAdjustments
) -> _Entries:
    """Take the adjusted tokens out of the logits; return them with both values."""
    assert adjustments.token_ids.dtype == torch.int32
    raw_values = torch.empty_like(adjustments.biases)
    adjusted_values = torch.empty_like(adjustments.biases)
    adjust_kernel[(len(logits),)](
        logits,
        logits.stride(0),
        positions,
        adjustments.starts,
        adjustments.lengths,
        adjustments.token_ids,
        adjustments.times,
        adjustments.biases,
        adjustments.held,
        adjustments.repetition_penalties,
        adjustments.frequency_penalties,
        adjustments.presence_penalties,
        adjustments.held_until,
        adjusted_values,
        raw_values,
        TILE=ADJUST_TILE,
        num_warps=4,
        **launch_options(),
    )
    return _Entries(
        adjustments.starts, adjustments.lengths, adjustments.token_ids, adjusted_values, raw_values
    )


def _survey(
    logits: torch.Tensor,
    rows: SamplingRows | None,
    logprob_rows: torch.Tensor | None,
    scratch: _Scratch,
    config: SamplingConfig,
) -> None:
    """Store the best of every group and the mass of chunks: for `rows`, or raw `logprob_rows`."""
    nothing = scratch.list_values
    num_surveyed = len(logits if logprob_rows is None else logprob_rows)
    num_chunks = scratch.chunk_best.shape[1]
    survey_kernel[(num_chunks, num_surveyed)](
        logits,
        logits.stride(0),
        nothing if logprob_rows is None else logprob_rows,
        nothing if rows is None else rows.temperatures,
        nothing if rows is None else rows.top_ks,
        nothing if rows is None else rows.min_ps,
        scratch.group_best,
        scratch.chunk_best,
        scratch.chunk_mass,
        logits.shape[1],
        scratch.group_best.shape[1],
        num_chunks,
        IS_GREEDY=rows is None and logprob_rows is None,
        IS_RAW=logprob_rows is not None,
        CHUNK=config.chunk,
        num_warps=config.survey_warps,
        **launch_options(),
    )


def _write_logprobs(
    logits: torch.Tensor,
    out: SampledRows,
    logprob_rows: torch.Tensor,
    scratch: _Scratch,
    config: SamplingConfig,
) -> None:
    num_logprob_rows, num_top = out.top_ids.shape
    assert len(logprob_rows) == num_logprob_rows <= len(logits) and num_top <= logits.shape[1]
    assert out.top_ids.is_contiguous() and out.top_logprobs.is_contiguous()
    _survey(logits, None, logprob_rows, scratch, config)
    logprobs_kernel[(num_logprob_rows,)](
        logits,
        logits.stride(0),
        logprob_rows,
        out.token_ids,
        scratch.group_best,
        scratch.chunk_best,
        scratch.chunk_mass,
        scratch.group_list,
        scratch.list_values,
        scratch.list_ids,
        out.logprobs,
        out.top_ids,
        out.top_logprobs,
        logits.shape[1],
        scratch.group_best.shape[1],
        scratch.chunk_best.shape[1],
        num_top,
        NUM_GROUPS=next_power_of_2(scratch.group_best.shape[1]),
        NUM_CHUNKS=next_power_of_2(scratch.chunk_best.shape[1]),
        CAPACITY=config.capacity,
        TILE=config.tile,
        num_warps=config.draw_warps,
        **launch_options(),
    )
