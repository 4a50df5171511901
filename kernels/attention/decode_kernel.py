"""The device code of tandem.kernels.attention.decode."""

from dataclasses import dataclass

import triton
import triton.language as tl

from tandem.kernels.attention import prefixes
from tandem.kernels.dependent_launch import wait_for_predecessor

LANES = tl.constexpr(256)  # sequences planned at a time
LOG2E = tl.constexpr(1.4426950408889634)
# Below every score, yet finite: a row that has seen nothing keeps it, and exp2 of it minus any
# score or itself is 0 or 1, never NaN.
NOTHING_SEEN = tl.constexpr(-1e30)
LEVELS = tl.constexpr(prefixes.LEVELS)
STATS = tl.constexpr(4)  # floats after a row of partial sums: maximum, total, room to align rows


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The constants of a launch, of the kernel for shared prefixes as of the other."""

    num_kv_heads: int
    group_size: int
    block_size: int
    head_dim: int
    padded_dim: int
    soft_cap: float
    window: int
    split_weight: float
    least_splits: int
    use_tma: bool
    tile_tokens: int


@triton.jit  # type: ignore[untyped-decorator]
def cut(first, end, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    # positions first to end |-> (first tile, end tile, tiles per split, splits); none have a split
    first_tile = first // SHAPE.tile_tokens
    end_tile = tl.cdiv(end, SHAPE.tile_tokens)
    root = tl.sqrt_rn(((end_tile - first_tile) * SHAPE.split_weight).to(tl.float32))
    split_tiles = tl.ceil(root).to(tl.int32)
    if SHAPE.least_splits > 0:
        split_tiles = tl.minimum(split_tiles, (end_tile - first_tile) // SHAPE.least_splits)
    split_tiles = tl.maximum(split_tiles, 1)
    num_splits = tl.maximum(tl.cdiv(end_tile - first_tile, split_tiles), 1)
    return first_tile, end_tile, split_tiles, num_splits


@triton.jit  # type: ignore[untyped-decorator]
def shared(prefix_ends, seqs, mask, level, num_seqs, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    # -> (where what the sequences share at the levels below `level` ends, splits of that)
    end = (seqs * 0).to(tl.int32)
    num_splits = end
    for lower in tl.static_range(LEVELS):
        is_lower = mask & (lower < level)
        next_end = tl.load(prefix_ends + lower * num_seqs + seqs, is_lower, 0).to(tl.int32)
        next_end = tl.maximum(next_end, end)
        _, _, _, splits = cut(end, next_end, SHAPE)
        num_splits += tl.where(next_end > end, splits, 0)
        end = next_end
    return end, num_splits


@triton.jit  # type: ignore[untyped-decorator]
def _first_own(  # type: ignore[no-untyped-def]
    prefix_ends, seqs, mask, contexts, num_seqs, SHAPE: tl.constexpr, HAS_PREFIXES: tl.constexpr
):
    # -> (the first position that the sequences read themselves, splits of those that they share)
    first = contexts * 0
    num_splits = first
    if SHAPE.window > 0:
        first = tl.maximum(contexts - SHAPE.window, 0)
    if HAS_PREFIXES:
        first, num_splits = shared(prefix_ends, seqs, mask, LEVELS, num_seqs, SHAPE)
    return first, num_splits


@triton.jit
def locate(place, ends, first_place):  # type: ignore[no-untyped-def]
    # -> (index of the first of `ends` past the place, distance from the end before)
    earlier = ends <= place
    return tl.sum(earlier.to(tl.int32)), place - tl.max(tl.where(earlier, ends, first_place))


@triton.jit  # type: ignore[untyped-decorator]
def _look_up(tile, keys, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    # The block of a tile, or of each of its positions where it may lie in several.
    _cache, _rows_per_block, my_table, _my_kv_head, my_begin, my_context = keys
    if SHAPE.block_size % SHAPE.tile_tokens == 0:
        in_sight = tile * SHAPE.tile_tokens < my_context
        ordinal = tile // (SHAPE.block_size // SHAPE.tile_tokens)
        return tl.load(my_table + ordinal, in_sight, 0).to(tl.int32)
    else:
        positions = tile * SHAPE.tile_tokens + tl.arange(0, SHAPE.tile_tokens)
        in_sight = (positions >= my_begin) & (positions < my_context)
        return tl.load(my_table + positions // SHAPE.block_size, in_sight, 0).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    tile, blocks, my_q, score_scale, keys, state, SHAPE: tl.constexpr, WHOLE: tl.constexpr
):
    # One tile of the online softmax. Tokens are the rows of scores: they fill the 64 rows of a
    # tensor core's tile, which the few query heads of a KV head would not.
    cache, rows_per_block, _my_table, my_kv_head, my_begin, my_context = keys
    best, weights_sum, acc = state
    positions = tile * SHAPE.tile_tokens + tl.arange(0, SHAPE.tile_tokens)
    if SHAPE.use_tma:
        slot = tile * SHAPE.tile_tokens % SHAPE.block_size
        row = blocks * rows_per_block + my_kv_head * SHAPE.block_size + slot
        k = cache.load([row, 0])
        v = cache.load([row + SHAPE.num_kv_heads * SHAPE.block_size, 0])
        if not WHOLE:
            # The copy engine cannot zero slots past the context, and 0 * NaN is NaN.
            v = tl.where((positions < my_context)[:, None], v, 0.0)
        v = tl.trans(v)
    else:
        dims = tl.arange(0, SHAPE.padded_dim)
        if SHAPE.block_size % SHAPE.tile_tokens == 0:
            slots = tile * SHAPE.tile_tokens % SHAPE.block_size + tl.arange(0, SHAPE.tile_tokens)
        else:
            slots = positions % SHAPE.block_size
        rows = blocks.to(tl.int64) * rows_per_block + (my_kv_head * SHAPE.block_size + slots)
        in_sight = (positions >= my_begin) & (positions < my_context)
        in_head = dims < SHAPE.head_dim
        k_ptrs = cache + rows[:, None] * SHAPE.head_dim + dims[None, :]
        k = tl.load(k_ptrs, in_sight[:, None] & in_head[None, :], 0.0)
        # Read as it is multiplied: a transposed load would not be pipelined on sm_80.
        v_rows = rows[None, :] + SHAPE.num_kv_heads * SHAPE.block_size
        v_ptrs = cache + v_rows * SHAPE.head_dim + dims[:, None]
        v = tl.load(v_ptrs, in_sight[None, :] & in_head[:, None], 0.0)
    blocks = _look_up(tile + 1, keys, SHAPE)

    scores = tl.dot(k, my_q, input_precision="ieee") * score_scale
    if SHAPE.soft_cap > 0:
        scores = (SHAPE.soft_cap * LOG2E) * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    if not WHOLE or SHAPE.window > 0:
        seen = (positions >= my_begin) & (positions < my_context)
        scores = tl.where(seen[:, None], scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 0))
    shrink = tl.exp2(best - new_best)
    weights = tl.exp2(scores - new_best[None, :])
    # Summed over the tokens once, at the end of the split.
    weights_sum = weights_sum * shrink[None, :] + weights
    acc = tl.dot(v, weights.to(v.dtype), acc * shrink[None, :], input_precision="ieee")
    return blocks, (new_best, weights_sum, acc)


@triton.jit  # type: ignore[untyped-decorator]
def attend(  # type: ignore[no-untyped-def]
    my_q,
    score_scale,
    keys,  # cache, rows_per_block, my_table, my_kv_head, my_begin, my_context
    my_tile,
    whole_end,
    my_end,
    SHAPE: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    # -> (maximum, total, weighted values) of each row over tiles my_tile to my_end, all of whose
    # positions are seen before whole_end where WHOLE.
    # The loops' stages are the launch's: as options of tl.range they would apply to the look-ups of
    # blocks too, and each step would wait for its own. A block is looked up one step ahead, mostly
    # in L1: sixteen ordinals share a line.
    best = tl.full([BLOCK_R], NOTHING_SEEN, tl.float32)
    weights_sum = tl.full([SHAPE.tile_tokens, BLOCK_R], 0.0, tl.float32)
    acc = tl.full([SHAPE.padded_dim, BLOCK_R], 0.0, tl.float32)
    state = (best, weights_sum, acc)
    blocks = _look_up(my_tile, keys, SHAPE)
    for tile in range(my_tile, whole_end):
        blocks, state = _step(tile, blocks, my_q, score_scale, keys, state, SHAPE, WHOLE)
    for tile in range(whole_end, my_end):
        blocks, state = _step(tile, blocks, my_q, score_scale, keys, state, SHAPE, False)
    best, weights_sum, acc = state
    return best, tl.sum(weights_sum, 0), acc


@triton.jit(do_not_specialize=["num_seqs", "max_splits", "tables_stride_seq"])  # type: ignore[untyped-decorator]
def paged_decode_kernel(  # type: ignore[no-untyped-def]
    q,  # [num_seqs, num_heads, head_dim]
    cache,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], or a descriptor of its rows
    block_tables,  # [num_seqs, max_blocks]
    context_lens,  # [num_seqs]
    sinks,  # [num_heads] where HAS_SINKS
    prefix_ends,  # [LEVELS, num_seqs] where HAS_PREFIXES: see SharedPrefixes
    out,  # [num_seqs, num_heads, head_dim]
    partials,  # [num_seqs, num_kv_heads, max_splits, group_size, head_dim + 4]
    arrivals,  # [num_seqs, num_kv_heads] splits finished, zero between launches
    score_scale,
    num_seqs,
    max_splits,
    q_stride_token,
    q_stride_head,
    rows_per_block,
    tables_stride_seq,
    out_stride_token,
    out_stride_head,
    SHAPE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_PREFIXES: tl.constexpr,  # and their partial sums
    BLOCK_R: tl.constexpr,
):
    # grid: (as many programs as are resident,); program p takes the items p, p + programs, ...
    # item |-> (split, of all sequences', KV head): the heads of a block are read together
    # row |-> a query head of my KV head
    rows = tl.arange(0, BLOCK_R)
    dims = tl.arange(0, SHAPE.padded_dim)
    row_mask = rows < SHAPE.group_size
    mask = (dims < SHAPE.head_dim)[:, None] & row_mask[None, :]
    wait_for_predecessor()
    item = tl.program_id(0)
    num_splits = 0
    for first_seq in range(0, num_seqs, LANES):
        seqs = first_seq + tl.arange(0, LANES)
        contexts = tl.load(context_lens + seqs, seqs < num_seqs, 0).to(tl.int32)
        firsts, _ = _first_own(
            prefix_ends, seqs, seqs < num_seqs, contexts, num_seqs, SHAPE, HAS_PREFIXES
        )
        _, _, _, splits = cut(firsts, contexts, SHAPE)
        ends = num_splits + tl.cumsum(tl.where(seqs < num_seqs, splits, 0))
        num_splits_before = num_splits
        num_splits = tl.max(ends)
        while item < num_splits * SHAPE.num_kv_heads:
            my_kv_head = item % SHAPE.num_kv_heads
            index, my_split = locate(item // SHAPE.num_kv_heads, ends, num_splits_before)
            my_seq = (first_seq + index).to(tl.int64)
            my_context = tl.load(context_lens + my_seq).to(tl.int32)
            my_first, num_before = _first_own(
                prefix_ends, my_seq, my_seq >= 0, my_context, num_seqs, SHAPE, HAS_PREFIXES
            )
            my_tile, my_end, split_tiles, my_splits = cut(my_first, my_context, SHAPE)
            my_begin = 0
            if SHAPE.window > 0:
                my_begin = my_first
            my_tile += my_split * split_tiles
            my_end = tl.minimum(my_tile + split_tiles, my_end)
            my_table = block_tables + my_seq * tables_stride_seq
            heads = my_kv_head * SHAPE.group_size + rows
            q_rows = q + my_seq * q_stride_token + heads * q_stride_head
            my_q = tl.load(q_rows[None, :] + dims[:, None], mask, 0.0)

            # With TMA, a tile that the query does not see whole comes last, in a loop with masks.
            whole_end = my_end
            if SHAPE.use_tma:
                whole_end = tl.maximum(tl.minimum(my_end, my_context // SHAPE.tile_tokens), my_tile)
            keys = (cache, rows_per_block, my_table, my_kv_head, my_begin, my_context)
            best, total, acc = attend(
                my_q, score_scale, keys, my_tile, whole_end, my_end, SHAPE, SHAPE.use_tma, BLOCK_R
            )

            all_splits = num_before + my_splits
            finished = all_splits == 1
            if all_splits > 1:
                pair = my_seq * SHAPE.num_kv_heads + my_kv_head
                width: tl.constexpr = SHAPE.head_dim + STATS
                pair_rows = partials + (pair * max_splits * SHAPE.group_size + rows) * width
                mine = pair_rows + (num_before + my_split) * (SHAPE.group_size * width)
                tl.store(mine[None, :] + dims[:, None], acc, mask)
                tl.store(mine + SHAPE.head_dim, best, row_mask)
                tl.store(mine + SHAPE.head_dim + 1, total, row_mask)
                # All threads have written before the one that counts releases what they wrote.
                tl.debug_barrier()
                finished = tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == my_splits - 1
                if finished:
                    tl.store(arrivals + pair, 0)
                    best, total, acc = _add_up(
                        pair_rows, all_splits, row_mask, mask, SHAPE, BLOCK_R
                    )
            if finished:
                if HAS_SINKS:
                    sink = tl.load(sinks + heads, row_mask, 0.0).to(tl.float32) * LOG2E
                    origin = tl.maximum(best, sink)
                    shrink = tl.exp2(best - origin)
                    total = total * shrink + tl.exp2(sink - origin)
                    acc *= shrink[None, :]
                out_rows = out + my_seq * out_stride_token + heads * out_stride_head
                result = acc / tl.where(total > 0, total, 1.0)[None, :]
                tl.store(out_rows[None, :] + dims[:, None], result.to(out.dtype.element_ty), mask)
            item += tl.num_programs(0)


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(pair_rows, num_splits, row_mask, mask, SHAPE: tl.constexpr, BLOCK_R: tl.constexpr):  # type: ignore[no-untyped-def]
    # In the order of splits, whichever finished last. Past L1, which may hold stale values.
    best = tl.full([BLOCK_R], NOTHING_SEEN, tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.full([SHAPE.padded_dim, BLOCK_R], 0.0, tl.float32)
    dims = tl.arange(0, SHAPE.padded_dim)[:, None]
    for split in tl.range(num_splits, loop_unroll_factor=4):
        other = pair_rows + split * (SHAPE.group_size * (SHAPE.head_dim + STATS))
        other_best = tl.load(other + SHAPE.head_dim, row_mask, NOTHING_SEEN, cache_modifier=".cg")
        other_total = tl.load(other + SHAPE.head_dim + 1, row_mask, 0.0, cache_modifier=".cg")
        other_acc = tl.load(other[None, :] + dims, mask, 0.0, cache_modifier=".cg")
        new_best = tl.maximum(best, other_best)
        shrink, share = tl.exp2(best - new_best), tl.exp2(other_best - new_best)
        total = total * shrink + other_total * share
        acc = acc * shrink[None, :] + other_acc * share[None, :]
        best = new_best
    return best, total, acc
