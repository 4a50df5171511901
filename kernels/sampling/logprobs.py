"""Log-probabilities of raw logits: of the drawn token and of the likeliest."""

import triton
import triton.language as tl

from tandem.kernels.dependent_launch import wait_for_predecessor
from tandem.kernels.sampling.candidates import float_key, gather_candidates, key_float, nth_best
from tandem.kernels.sampling.items import load_slots, num_slots

_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = tl.constexpr(1.4426950408889634)
_ID_BITS = tl.constexpr(0xFFFFFFFF)
_NO_KEY = tl.constexpr(-(2**63))


@triton.jit(do_not_specialize=["num_top"])  # type: ignore[untyped-decorator]
def logprobs_kernel(  # type: ignore[no-untyped-def]
    logits,  # [num_rows, vocab_size]
    logits_stride_row,
    logprob_rows,  # [num_logprob_rows]
    token_ids,  # [num_rows]
    group_best,  # [num_logprob_rows, num_groups]
    chunk_best,  # [num_logprob_rows, num_chunks]
    chunk_mass,  # [num_logprob_rows, num_chunks]
    group_list,  # [num_logprob_rows, num_groups], overwritten
    list_values,  # [num_logprob_rows, CAPACITY], overwritten
    list_ids,  # [num_logprob_rows, CAPACITY], overwritten
    logprobs,  # [num_logprob_rows]
    top_ids,  # [num_logprob_rows, num_top]
    top_logprobs,  # [num_logprob_rows, num_top]
    vocab_size,
    num_groups,
    num_chunks,
    num_top,
    NUM_GROUPS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    # grid: (num_logprob_rows,)
    my_place = tl.program_id(0).to(tl.int64)
    wait_for_predecessor()
    my_row = tl.load(logprob_rows + my_place).to(tl.int64)
    my_logits = logits + my_row * logits_stride_row
    chunks = tl.arange(0, NUM_CHUNKS)
    is_chunk = chunks < num_chunks
    my_chunks = my_place * num_chunks + chunks
    bests = tl.load(chunk_best + my_chunks, mask=is_chunk, other=float("-inf"))
    masses = tl.load(chunk_mass + my_chunks, mask=is_chunk, other=0.0)
    my_best = tl.max(bests)
    log_mass = _LN2 * tl.log2(tl.sum(masses * tl.exp2((bests - my_best) * _LOG2E)))

    my_token = tl.maximum(tl.load(token_ids + my_row), 0)
    chosen = tl.load(my_logits + my_token).to(tl.float32)
    tl.store(logprobs + my_place, chosen - my_best - log_mass)

    if num_top > 0:
        groups = tl.arange(0, NUM_GROUPS)
        is_group = groups < num_groups
        my_group_best = tl.load(
            group_best + my_place * num_groups + groups, mask=is_group, other=float("-inf")
        )
        my_values = list_values + my_place * CAPACITY
        my_ids = list_ids + my_place * CAPACITY
        num_listed = tl.full([], CAPACITY + 1, tl.int32)
        if num_top <= num_groups:
            bound = nth_best(my_group_best, is_group, num_top)
            row = (my_logits, vocab_size, my_group_best, num_groups)
            lists = (group_list + my_place * num_groups, my_values, my_ids)
            extras = (my_values, my_ids, 0)
            num_listed = gather_candidates(bound, row, extras, lists, NUM_GROUPS, CAPACITY)
        num_dense = tl.zeros([], tl.int32)
        if num_listed > CAPACITY:
            num_listed = tl.zeros([], tl.int32)
            num_dense += vocab_size
        items = (my_values, my_ids, num_listed, my_logits, 0, num_dense)
        # Best first, and of equals the lowest id: each is the largest key below the last one.
        last = tl.full([], 2**63 - 1, tl.int64)
        for rank in range(num_top):
            key = tl.full([], _NO_KEY, tl.int64)
            for slot in range(0, num_slots(items, TILE), TILE):
                values, ids = load_slots(slot, items, TILE)
                keys = (float_key(values + 0.0) << 32) | (ids.to(tl.int64) ^ _ID_BITS)
                keys = tl.where((ids >= 0) & (keys < last), keys, _NO_KEY)
                key = tl.maximum(key, tl.max(keys))
            last = key
            tl.store(top_ids + my_place * num_top + rank, (key & _ID_BITS) ^ _ID_BITS)
            logprob = key_float(key >> 32) - my_best - log_mass
            tl.store(top_logprobs + my_place * num_top + rank, logprob)
