"""The candidates of a row: its tokens at or above a bound, found by their groups.

A group is GROUP tokens with consecutive ids, of which the survey (survey.py) stores the best. At
least n tokens reach the n-th best of these, so a bound that holds the n best is known without the
row, and only groups that reach it are read again.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(64)
GATHER_TILE = tl.constexpr(2048)  # tokens that are looked at together
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def float_key(value):  # type: ignore[no-untyped-def]
    """Return an integer that is larger for a larger float32 (not NaN)."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & _MAGNITUDE)).to(tl.int64)


@triton.jit
def key_float(key):  # type: ignore[no-untyped-def]
    """Return the float32 of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & _MAGNITUDE)).to(tl.float32, bitcast=True)


@triton.jit
def nth_best(values, valid, rank):  # type: ignore[no-untyped-def]
    """Return a number that at least `rank` of the valid `values` reach, and few more than that.

    Invalid values must be -inf.
    """
    low = float_key(tl.min(tl.where(valid, values, float("inf"))))
    high = float_key(tl.max(values)) + 1
    reached = tl.sum(valid.to(tl.int32))
    while (high - low > 1) & (reached > rank + rank // 4):
        middle = (low + high) >> 1
        count = tl.sum((valid & (values >= key_float(middle))).to(tl.int32))
        enough = count >= rank
        low = tl.where(enough, middle, low)
        reached = tl.where(enough, count, reached)
        high = tl.where(enough, high, middle)
    return key_float(low)


@triton.jit  # type: ignore[untyped-decorator]
def gather_candidates(  # type: ignore[no-untyped-def]
    bound,
    row,  # its logits, vocab_size, the tile [NUM_GROUPS] of the groups' best, num_groups
    extras,  # values, int32 ids and number of tokens that are not in the row's logits
    lists,  # group_list [num_groups], values and ids [CAPACITY]: overwritten
    NUM_GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Count the tokens that reach `bound`, and list their values and ids if they fit.

    A count above CAPACITY means that they do not fit, by any number.
    """
    row_logits, vocab_size, group_best, num_groups = row
    extra_values, extra_ids, num_extras = extras
    group_list, list_values, list_ids = lists
    groups = tl.arange(0, NUM_GROUPS)
    chosen = (groups < num_groups) & (group_best >= bound)
    tl.store(group_list + tl.cumsum(chosen.to(tl.int32)) - 1, groups, mask=chosen)
    num_chosen = tl.sum(chosen.to(tl.int32))
    tl.debug_barrier()  # other threads read the list than wrote it

    lanes = tl.arange(0, GATHER_TILE)
    first = tl.zeros([], tl.int32)
    num_listed = tl.zeros([], tl.int32)
    while (first < num_chosen * GROUP) & (num_listed <= CAPACITY):
        index = first + lanes
        mine = index < num_chosen * GROUP
        ids = tl.load(group_list + index // GROUP, mask=mine, other=0) * GROUP + index % GROUP
        mine &= ids < vocab_size
        values = tl.load(row_logits + ids, mask=mine, other=float("-inf")).to(tl.float32)
        num_listed = _append(
            values, ids, mine & (values >= bound), list_values, list_ids, num_listed, CAPACITY
        )
        first += GATHER_TILE
    first = tl.zeros([], tl.int32)
    while (first < num_extras) & (num_listed <= CAPACITY):
        mine = first + lanes < num_extras
        values = tl.load(extra_values + first + lanes, mask=mine, other=float("-inf"))
        ids = tl.load(extra_ids + first + lanes, mask=mine, other=0)
        num_listed = _append(
            values, ids, mine & (values >= bound), list_values, list_ids, num_listed, CAPACITY
        )
        first += GATHER_TILE
    tl.debug_barrier()
    return num_listed


@triton.jit
def _append(values, ids, kept, list_values, list_ids, num_listed, CAPACITY):  # type: ignore[no-untyped-def]
    slots = num_listed + tl.cumsum(kept.to(tl.int32)) - 1
    fits = kept & (slots < CAPACITY)
    tl.store(list_values + slots, values, mask=fits)
    tl.store(list_ids + slots, ids, mask=fits)
    return num_listed + tl.sum(kept.to(tl.int32))
