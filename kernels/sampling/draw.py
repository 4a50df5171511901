"""From a survey of a row to its token: thresholds, then the inverse CDF in the order of ids."""

import triton
import triton.language as tl

from tandem.kernels.dependent_launch import wait_for_predecessor
from tandem.kernels.sampling.candidates import GROUP, gather_candidates, nth_best
from tandem.kernels.sampling.items import (
    cumulated_chunks,
    first_with_more_up_to,
    least_with_less_above,
    load_slots,
    mass_from,
    num_slots,
)
from tandem.kernels.sampling.rows import LARGEST_LOGIT, LEAST_TEMPERATURE, NO_TOKEN

_LARGEST_LOGIT = tl.constexpr(LARGEST_LOGIT)
_LEAST_TEMPERATURE = tl.constexpr(LEAST_TEMPERATURE)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_NO_ID = tl.constexpr(0x7FFFFFFF)
LOG2E = tl.constexpr(1.4426950408889634)

# SplitMix64 (Steele, Lea, Flood 2014).
_STEP = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit  # type: ignore[untyped-decorator]
def draw_kernel(  # type: ignore[no-untyped-def]
    logits,  # [num_rows, vocab_size], without the adjusted tokens
    logits_stride_row,
    group_best,  # [num_rows, num_groups]
    chunk_best,  # [num_rows, num_chunks]
    chunk_mass,  # [num_rows, num_chunks]
    temperatures,  # [num_rows]
    top_ks,  # [num_rows]
    top_ps,  # [num_rows]
    min_ps,  # [num_rows]
    seeds,  # [num_rows]
    positions,  # [num_rows]
    entry_starts,  # [num_rows]
    entry_lengths,  # [num_rows]
    entry_ids,  # [num_entries]
    adjusted_values,  # [num_entries]
    raw_values,  # [num_entries]
    group_list,  # [num_rows, num_groups], overwritten
    list_values,  # [num_rows, CAPACITY], overwritten
    list_ids,  # [num_rows, CAPACITY], overwritten
    token_ids,  # [num_rows]
    vocab_size,
    num_groups,
    num_chunks,
    IS_GREEDY: tl.constexpr,
    HAS_ENTRIES: tl.constexpr,
    MASS_UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    # grid: (num_rows,)
    my_row = tl.program_id(0).to(tl.int64)
    my_logits = logits + my_row * logits_stride_row
    wait_for_predecessor()
    my_num_extras = tl.zeros([], tl.int32)
    if HAS_ENTRIES:
        my_num_extras = tl.load(entry_lengths + my_row).to(tl.int32)
        my_start = tl.load(entry_starts + my_row).to(tl.int64)
        adjusted_values += my_start
        raw_values += my_start
        entry_ids += my_start
    my_extras = (adjusted_values, entry_ids, my_num_extras, my_logits, 0, 0)
    groups = tl.arange(0, NUM_GROUPS)
    my_group_best = tl.load(
        group_best + my_row * num_groups + groups, mask=groups < num_groups, other=float("-inf")
    )
    my_best = tl.max(my_group_best)
    for slot in range(0, my_num_extras, TILE):
        values, _ = load_slots(slot, my_extras, TILE)
        my_best = tl.maximum(my_best, tl.max(values))

    my_token = tl.full([], _NO_TOKEN, tl.int32)
    if (my_best > -_LARGEST_LOGIT) & (my_best < _LARGEST_LOGIT):
        my_temperature = tl.zeros([], tl.float32)
        if not IS_GREEDY:
            my_temperature = tl.load(temperatures + my_row)
        if my_temperature <= 0:
            my_token = _first_at(
                my_best, my_group_best, my_logits, vocab_size, my_extras, NUM_GROUPS, TILE
            )
        elif not IS_GREEDY:
            my_filters = (
                tl.load(top_ks + my_row),
                tl.load(top_ps + my_row),
                tl.load(min_ps + my_row),
            )
            my_draw = (tl.load(seeds + my_row), tl.load(positions + my_row).to(tl.int64))
            row = (my_logits, vocab_size, my_group_best, num_groups)
            my_chunks = my_row * num_chunks
            survey = (chunk_best + my_chunks, chunk_mass + my_chunks, num_chunks)
            my_lists = (
                group_list + my_row * num_groups,
                list_values + my_row * CAPACITY,
                list_ids + my_row * CAPACITY,
            )
            my_token = _drawn(
                my_temperature,
                my_filters,
                my_draw,
                my_best,
                row,
                survey,
                my_extras,
                my_lists,
                MASS_UNIT,
                CHUNK,
                NUM_GROUPS,
                NUM_CHUNKS,
                CAPACITY,
                TILE,
            )
    tl.store(token_ids + my_row, my_token.to(tl.int64))

    if HAS_ENTRIES:
        # The logits are restored once all of the row has been read.
        tl.debug_barrier()
        lanes = tl.arange(0, TILE)
        for first in range(0, my_num_extras, TILE):
            mine = first + lanes < my_num_extras
            entry_id = tl.load(entry_ids + first + lanes, mask=mine, other=0)
            raw = tl.load(raw_values + first + lanes, mask=mine, other=0.0)
            tl.store(my_logits + entry_id, raw.to(logits.dtype.element_ty), mask=mine)


@triton.jit
def _first_at(value, group_best, row_logits, vocab_size, extras, NUM_GROUPS, TILE):  # type: ignore[no-untyped-def]
    """Return the lowest id whose value is `value`, the row's best."""
    group = tl.min(tl.where(group_best == value, tl.arange(0, NUM_GROUPS), NUM_GROUPS))
    members = group * GROUP + tl.arange(0, GROUP)
    logits = tl.load(row_logits + members, mask=members < vocab_size, other=float("-inf"))
    lowest = tl.min(tl.where(logits.to(tl.float32) == value, members, _NO_ID))
    for slot in range(0, num_slots(extras, TILE), TILE):
        values, ids = load_slots(slot, extras, TILE)
        lowest = tl.minimum(lowest, tl.min(tl.where(values == value, ids, _NO_ID)))
    return lowest


@triton.jit  # type: ignore[untyped-decorator]
def _drawn(  # type: ignore[no-untyped-def]
    temperature,
    filters,  # top_k, top_p, min_p
    draw,  # seed, position
    best,
    row,  # as gather_candidates takes it, and the lists
    survey,  # as cumulated_chunks takes it
    extras,
    lists,
    MASS_UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    top_k, top_p, min_p = filters
    seed, position = draw
    row_logits, vocab_size, group_best, num_groups = row
    chunk_best, chunk_mass, num_chunks = survey
    _group_list, list_values, list_ids = lists
    temperature = tl.maximum(temperature, _LEAST_TEMPERATURE)
    scaling = (best, 1 / temperature * LOG2E, MASS_UNIT)
    rank = tl.where(top_k < vocab_size, tl.maximum(top_k, 0), 0).to(tl.int32)
    threshold = tl.full([], float("-inf"), tl.float32)
    if min_p > 0:
        threshold = best + temperature * tl.log(min_p)
    is_filtered = (rank > 0) | (top_p < 1) | (min_p > 0)
    # A nucleus without other filters is a share of the mass of the whole row.
    is_share_of_all = (rank == 0) & (min_p <= 0)
    extra_values, extra_ids, num_extras, _, _, _ = extras

    # Candidates, if they are few: all that top-k or min-p keep, or, for a nucleus alone, what
    # reaches the better half of the groups' best, if that is enough.
    is_listed = is_filtered & (rank <= num_groups // 2)
    low = threshold
    num_listed = tl.zeros([], tl.int32)
    total = tl.zeros([], tl.int64)
    if is_listed:
        if (rank > 0) | is_share_of_all:
            num_best = tl.where(rank > 0, rank, tl.maximum(num_groups // 2, 1))
            is_group = tl.arange(0, NUM_GROUPS) < num_groups
            low = tl.maximum(low, nth_best(group_best, is_group, num_best))
        few_extras = (extra_values, extra_ids, num_extras)
        num_listed = gather_candidates(low, row, few_extras, lists, NUM_GROUPS, CAPACITY)
        is_listed = num_listed <= CAPACITY
        if is_listed & is_share_of_all:
            upto_chunks = cumulated_chunks(threshold, survey, extras, scaling, CHUNK, NUM_CHUNKS)
            total = tl.max(upto_chunks)
            items = (list_values, list_ids, num_listed, row_logits, 0, 0)
            listed = mass_from(low, 0, vocab_size, items, scaling, TILE)
            is_listed = listed >= _share_of(total, top_p)
    num_dense = tl.zeros([], tl.int32)
    if not is_listed:
        list_values = extra_values
        list_ids = extra_ids
        num_listed = num_extras
        num_dense += vocab_size
        low = threshold
        total = tl.zeros([], tl.int64)
    items = (list_values, list_ids, num_listed, row_logits, 0, num_dense)

    if rank > 0:
        # Unless listed, fewer than `rank` may reach what min-p asks for.
        lowest = tl.where(is_listed, low, float("-inf"))
        edge = least_with_less_above(rank, lowest, items, scaling, TILE, False)
        threshold = tl.maximum(threshold, edge)
    if top_p < 1:
        low = tl.maximum(low, threshold)
        if total == 0:
            total = mass_from(low, 0, vocab_size, items, scaling, TILE)
        wanted = _share_of(total, top_p)
        edge = least_with_less_above(wanted, low, items, scaling, TILE, True)
        threshold = tl.maximum(threshold, edge)

    first_id = tl.zeros([], tl.int32)
    end_id = tl.zeros([], tl.int32)
    highest_id = end_id + vocab_size - 1
    point = tl.zeros([], tl.int64)
    if not is_listed:
        # The chunk of the row first, then the token in it.
        if is_filtered:
            for chunk in range(num_chunks):
                first = chunk * CHUNK
                highest_id = tl.minimum(first + CHUNK, vocab_size) - 1
                chunk_items = (extra_values, extra_ids, 0, row_logits, first, highest_id + 1)
                kept = mass_from(threshold, 0, highest_id, chunk_items, scaling, TILE)
                tl.store(chunk_best + chunk, best)
                tl.store(chunk_mass + chunk, kept.to(tl.float32) / MASS_UNIT)
            tl.debug_barrier()
        upto_chunks = cumulated_chunks(threshold, survey, extras, scaling, CHUNK, NUM_CHUNKS)
        point = _share(tl.max(upto_chunks), seed, position)
        passed = upto_chunks <= point
        point -= tl.max(tl.where(passed, upto_chunks, 0))
        first_id += tl.sum(passed.to(tl.int32)) * CHUNK
        end_id = tl.minimum(first_id + CHUNK, vocab_size)
        highest_id = end_id - 1
    items = (list_values, list_ids, num_listed, row_logits, first_id, end_id)
    total = mass_from(threshold, first_id, highest_id, items, scaling, TILE)
    if is_listed:
        point = _share(total, seed, position)
    # A chunk's sum in float32 and the exact one differ in the last digits.
    point = tl.minimum(point, total - 1)
    return first_with_more_up_to(point, threshold, first_id, highest_id, items, scaling, TILE)


@triton.jit
def _share_of(total, fraction):  # type: ignore[no-untyped-def]
    """Return the least mass that is at least `fraction` of `total`, and not 0."""
    share = tl.ceil(fraction.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(share, 1)


@triton.jit
def _share(total, seed, position):  # type: ignore[no-untyped-def]
    """Return the floor of `total`, which is below 2**62, times uniform(seed, position)."""
    seed = seed.to(tl.uint64, bitcast=True)
    u = _mix(_mix(seed) ^ position.to(tl.uint64, bitcast=True)) >> 12
    total = total.to(tl.uint64, bitcast=True)
    share = (tl.umulhi(total, u) << 12) | ((total * u) >> 52)
    return share.to(tl.int64, bitcast=True)


@triton.jit
def _mix(value):  # type: ignore[no-untyped-def]
    value += _STEP
    value = (value ^ (value >> 30)) * _MULTIPLIER_1
    value = (value ^ (value >> 27)) * _MULTIPLIER_2
    return value ^ (value >> 31)
