"""The passes over the logits before a draw: the adjustment of single tokens, and the survey."""

import triton
import triton.language as tl

from tandem.kernels.dependent_launch import wait_for_predecessor
from tandem.kernels.sampling.candidates import GROUP
from tandem.kernels.sampling.draw import LOG2E
from tandem.kernels.sampling.rows import LEAST_TEMPERATURE

_LEAST_TEMPERATURE = tl.constexpr(LEAST_TEMPERATURE)


@triton.jit
def _finite_or_inf(values):  # type: ignore[no-untyped-def]
    """Replace NaN by +inf, so that the best value shows either."""
    return tl.where(values == values, values, float("inf"))


@triton.jit  # type: ignore[untyped-decorator]
def adjust_kernel(  # type: ignore[no-untyped-def]
    logits,  # [num_rows, vocab_size]
    logits_stride_row,
    positions,  # [num_rows]
    entry_starts,  # [num_rows]
    entry_lengths,  # [num_rows]
    entry_ids,  # [num_entries]
    entry_times,  # [num_entries]
    entry_biases,  # [num_entries]
    entry_held,  # [num_entries]
    repetition_penalties,  # [num_rows]
    frequency_penalties,  # [num_rows]
    presence_penalties,  # [num_rows]
    held_until,  # [num_rows]
    adjusted_values,  # [num_entries]
    raw_values,  # [num_entries]
    TILE: tl.constexpr,
):
    # grid: (num_rows,)
    my_row = tl.program_id(0).to(tl.int64)
    my_logits = logits + my_row * logits_stride_row
    wait_for_predecessor()
    my_start = tl.load(entry_starts + my_row).to(tl.int64)
    my_length = tl.load(entry_lengths + my_row).to(tl.int32)
    my_repetition = tl.load(repetition_penalties + my_row)
    my_frequency = tl.load(frequency_penalties + my_row)
    my_presence = tl.load(presence_penalties + my_row)
    holds = tl.load(positions + my_row) < tl.load(held_until + my_row)
    lanes = tl.arange(0, TILE)
    for first in range(0, my_length, TILE):
        mine = first + lanes < my_length
        entries = my_start + first + lanes
        ids = tl.load(entry_ids + entries, mask=mine, other=0)
        raw = tl.load(my_logits + ids, mask=mine, other=0.0).to(tl.float32)
        times = tl.load(entry_times + entries, mask=mine, other=-1)
        penalized = tl.where(raw > 0, tl.div_rn(raw, my_repetition), raw * my_repetition)
        values = tl.where(times >= 0, penalized, raw)
        cost = times.to(tl.float32) * my_frequency + my_presence
        values = tl.where(times > 0, values - cost, values)
        values += tl.load(entry_biases + entries, mask=mine, other=0.0)
        held = tl.load(entry_held + entries, mask=mine, other=0).to(tl.int1) & holds
        values = _finite_or_inf(tl.where(held, float("-inf"), values))
        tl.store(adjusted_values + entries, values, mask=mine)
        tl.store(raw_values + entries, raw, mask=mine)
        removed = tl.full([TILE], float("-inf"), tl.float32).to(logits.dtype.element_ty)
        tl.store(my_logits + ids, removed, mask=mine)


@triton.jit  # type: ignore[untyped-decorator]
def survey_kernel(  # type: ignore[no-untyped-def]
    logits,  # [num_rows, vocab_size]
    logits_stride_row,
    logprob_rows,  # [num_surveyed], if IS_RAW
    temperatures,  # [num_rows]
    top_ks,  # [num_rows]
    min_ps,  # [num_rows]
    group_best,  # [num_surveyed, num_groups]
    chunk_best,  # [num_surveyed, num_chunks]
    chunk_mass,  # [num_surveyed, num_chunks]
    vocab_size,
    num_groups,
    num_chunks,
    IS_GREEDY: tl.constexpr,
    IS_RAW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # grid: (num_chunks, num_surveyed)
    my_chunk = tl.program_id(0)
    my_place = tl.program_id(1).to(tl.int64)
    wait_for_predecessor()
    my_row = my_place
    scale = tl.full([], LOG2E, tl.float32)
    needs_mass = not IS_GREEDY
    if IS_RAW:
        my_row = tl.load(logprob_rows + my_place).to(tl.int64)
    elif not IS_GREEDY:
        temperature = tl.load(temperatures + my_row)
        top_k = tl.load(top_ks + my_row)
        scale = 1 / tl.maximum(temperature, _LEAST_TEMPERATURE) * LOG2E
        is_share_of_all = ((top_k <= 0) | (top_k >= vocab_size)) & (tl.load(min_ps + my_row) <= 0)
        needs_mass = (temperature > 0) & is_share_of_all
    ids = my_chunk * CHUNK + tl.arange(0, CHUNK)
    my_logits = logits + my_row * logits_stride_row
    values = tl.load(my_logits + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    values = _finite_or_inf(values)
    my_group_best = tl.max(tl.reshape(values, [CHUNK // GROUP, GROUP]), 1)
    groups = my_chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    mine = groups < num_groups
    tl.store(group_best + my_place * num_groups + groups, my_group_best, mask=mine)
    if needs_mass:
        my_best = tl.max(my_group_best)
        # A chunk without a token that could be drawn has no mass; one of +inf is not looked at.
        anchor = tl.where(tl.abs(my_best) < float("inf"), my_best, 0.0)
        mass = tl.sum(tl.exp2((values - anchor) * scale))
        tl.store(chunk_best + my_place * num_chunks + my_chunk, my_best)
        tl.store(chunk_mass + my_place * num_chunks + my_chunk, mass)
