"""Sums and searches over a row's tokens, or over few of them.

`items` is (values, ids, num_listed, row_logits, first_id, end_id): a list of num_listed tokens in
any order, and the row's own tokens with ids in [first_id, end_id); either may be empty. `scaling`
is (best, scale, unit): the row's best logit, log2(e) / temperature, and the best token's mass. A
mass is a fixed-point integer, so that sums are exact whatever their order.
"""

import triton
import triton.language as tl

from tandem.kernels.sampling.candidates import float_key, key_float

PREFIX_TILE = tl.constexpr(32)  # listed tokens compared with all chunks at a time
SHORT = tl.constexpr(128)  # listed tokens that are compared pairwise, without steps to wait for


@triton.jit
def mass_of(values, scaling):  # type: ignore[no-untyped-def]
    """Return int64 masses of logits that are no larger than the best."""
    best, scale, unit = scaling
    return (tl.exp2((values - best) * scale) * unit).to(tl.int64)


@triton.jit
def num_slots(items, TILE):  # type: ignore[no-untyped-def]
    """Count the slots: the list padded to whole tiles, then the row's tokens."""
    _, _, num_listed, _, first_id, end_id = items
    return (num_listed + TILE - 1) // TILE * TILE + end_id - first_id


@triton.jit
def load_slots(slot, items, TILE):  # type: ignore[no-untyped-def]
    """Load values and ids of TILE slots; -inf and -1 where a slot is empty."""
    list_values, list_ids, num_listed, row_logits, first_id, end_id = items
    lanes = tl.arange(0, TILE)
    num_padded = (num_listed + TILE - 1) // TILE * TILE
    if slot < num_padded:
        mine = slot + lanes < num_listed
        values = tl.load(list_values + slot + lanes, mask=mine, other=float("-inf"))
        ids = tl.load(list_ids + slot + lanes, mask=mine, other=-1).to(tl.int32)
    else:
        ids = first_id + (slot - num_padded) + lanes
        mine = ids < end_id
        values = tl.load(row_logits + ids, mask=mine, other=float("-inf")).to(tl.float32)
        ids = tl.where(mine, ids, -1)
    return values, ids


@triton.jit
def is_short(items):  # type: ignore[no-untyped-def]
    """Return True when all items are in the list and there are at most SHORT."""
    _, _, num_listed, _, first_id, end_id = items
    return (num_listed <= SHORT) & (end_id <= first_id)


@triton.jit
def mass_from(threshold, lowest_id, highest_id, items, scaling, TILE):  # type: ignore[no-untyped-def]
    """Sum the mass of ids in [lowest_id, highest_id] whose value is at least `threshold`."""
    total = tl.zeros([], tl.int64)
    for slot in range(0, num_slots(items, TILE), TILE):
        values, ids = load_slots(slot, items, TILE)
        kept = (values >= threshold) & (ids >= lowest_id) & (ids <= highest_id)
        total += tl.sum(tl.where(kept, mass_of(values, scaling), 0))
    return total


@triton.jit  # type: ignore[untyped-decorator]
def least_with_less_above(wanted, low, items, scaling, TILE, BY_MASS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the least value that has less than `wanted` above it, in tokens or in mass.

    `wanted` is at least 1, and at or above `low` stands no less than that.
    """
    edge = scaling[0]
    if is_short(items):
        few, few_ids = load_slots(0, items, SHORT)
        weights = tl.full([SHORT], 1, tl.int64)
        if BY_MASS:
            weights = mass_of(few, scaling)
        above_few = tl.sum(tl.where(few[:, None] > few[None, :], weights[:, None], 0), 0)
        edge = tl.min(tl.where((above_few < wanted) & (few_ids >= 0), few, float("inf")))
    else:
        # Bisection over keys. Each end moves to the next value that occurs, so that the number of
        # steps is about the logarithm of the number of tokens.
        low_key = float_key(low) - 1
        high_key = float_key(edge)
        while high_key - low_key > 1:
            middle_key = (low_key + high_key) >> 1
            middle = key_float(middle_key)
            weight = tl.zeros([], tl.int64)
            over = tl.full([], float("inf"), tl.float32)
            under = tl.full([], float("-inf"), tl.float32)
            for slot in range(0, num_slots(items, TILE), TILE):
                values, _ = load_slots(slot, items, TILE)
                above = values > middle
                if BY_MASS:
                    weight += tl.sum(tl.where(above, mass_of(values, scaling), 0))
                else:
                    weight += tl.sum(above.to(tl.int32))
                over = tl.minimum(over, tl.min(tl.where(above, values, float("inf"))))
                under = tl.maximum(under, tl.max(tl.where(above, float("-inf"), values)))
            enough = weight >= wanted
            low_key = tl.where(enough, float_key(over) - 1, low_key)
            # The minimum, as 0.0 is not above -0.0 but has the larger key.
            high_key = tl.where(enough, high_key, tl.minimum(float_key(under), middle_key))
        edge = key_float(high_key)
    return edge


@triton.jit
def first_with_more_up_to(point, threshold, lowest_id, highest_id, items, scaling, TILE):  # type: ignore[no-untyped-def]
    """Find the first id in [lowest_id, highest_id] up to which there is more mass than `point`.

    Counted are values of at least `threshold`; in all they have more than `point`.
    """
    found = highest_id
    if is_short(items):
        few, few_ids = load_slots(0, items, SHORT)
        few_kept = (few >= threshold) & (few_ids >= lowest_id) & (few_ids <= highest_id)
        few_masses = tl.where(few_kept, mass_of(few, scaling), 0)
        no_later = few_ids[:, None] <= few_ids[None, :]
        upto = tl.sum(tl.where(no_later, few_masses[:, None], 0), 0)
        found = tl.min(tl.where((few_masses > 0) & (upto > point), few_ids, highest_id))
    else:
        low = lowest_id - 1
        while found - low > 1:
            middle = (low + found) >> 1
            mass = tl.zeros([], tl.int64)
            last = lowest_id
            following = highest_id
            for slot in range(0, num_slots(items, TILE), TILE):
                values, ids = load_slots(slot, items, TILE)
                masses = mass_of(values, scaling)
                kept = (values >= threshold) & (masses > 0)
                before = kept & (ids >= lowest_id) & (ids <= middle)
                mass += tl.sum(tl.where(before, masses, 0))
                last = tl.maximum(last, tl.max(tl.where(before, ids, lowest_id)))
                behind = kept & (ids > middle) & (ids <= highest_id)
                following = tl.minimum(following, tl.min(tl.where(behind, ids, highest_id)))
            enough = mass > point
            found = tl.where(enough, last, found)
            low = tl.where(enough, low, following - 1)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def cumulated_chunks(  # type: ignore[no-untyped-def]
    threshold,
    survey,  # chunk_best, chunk_mass: sums of exp2((logit - the chunk's best) * scale), num_chunks
    extras,  # items that are in no chunk's sum
    scaling,
    CHUNK,
    NUM_CHUNKS: tl.constexpr,
):
    """Return [NUM_CHUNKS], the mass of all ids below each chunk's end, `extras` included."""
    chunk_best, chunk_mass, num_chunks = survey
    best, scale, unit = scaling
    chunks = tl.arange(0, NUM_CHUNKS)
    bests = tl.load(chunk_best + chunks, mask=chunks < num_chunks, other=float("-inf"))
    sums = tl.load(chunk_mass + chunks, mask=chunks < num_chunks, other=0.0)
    masses = (sums * tl.exp2((bests - best) * scale) * unit).to(tl.int64)
    # Where even the best token's mass is 0, a chunk has none to draw.
    masses = tl.where(mass_of(bests, scaling) > 0, masses, 0)
    cumulated = tl.cumsum(masses)
    ends = (chunks + 1) * CHUNK
    for slot in range(0, num_slots(extras, PREFIX_TILE), PREFIX_TILE):
        values, ids = load_slots(slot, extras, PREFIX_TILE)
        listed = tl.where(values >= threshold, mass_of(values, scaling), 0)
        before = ids[:, None] < ends[None, :]
        cumulated += tl.sum(tl.where(before, listed[:, None], 0), 0)
    return cumulated
