"""The device code of tandem.kernels.attention.decode."""

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


@triton.jit  # type: ignore[untyped-decorator]
def cut(  # type: ignore[no-untyped-def]
    first, end, split_weight: tl.constexpr, least_splits: tl.constexpr, BLOCK_N: tl.constexpr
):
    # positions first to end |-> (first tile, end tile, tiles per split, splits); none have a split
    first_tile = first // BLOCK_N
    end_tile = tl.cdiv(end, BLOCK_N)
    root = tl.sqrt_rn(((end_tile - first_tile) * split_weight).to(tl.float32))
    split_tiles = tl.ceil(root).to(tl.int32)
    if least_splits > 0:
        split_tiles = tl.minimum(split_tiles, (end_tile - first_tile) // least_splits)
    split_tiles = tl.maximum(split_tiles, 1)
    num_splits = tl.maximum(tl.cdiv(end_tile - first_tile, split_tiles), 1)
    return first_tile, end_tile, split_tiles, num_splits


@triton.jit  # type: ignore[untyped-decorator]
def shared(  # type: ignore[no-untyped-def]
    prefix_ends,
    seqs,
    mask,
    level,
    num_seqs,
    split_weight: tl.constexpr,
    least_splits: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # -> (where what the sequences share at the levels below `level` ends, splits of that)
    end = (seqs * 0).to(tl.int32)
    num_splits = end
    for lower in tl.static_range(LEVELS):
        is_lower = mask & (lower < level)
        next_end = tl.load(prefix_ends + lower * num_seqs + seqs, is_lower, 0).to(tl.int32)
        next_end = tl.maximum(next_end, end)
        _, _, _, splits = cut(end, next_end, split_weight, least_splits, BLOCK_N)
        num_splits += tl.where(next_end > end, splits, 0)
        end = next_end
    return end, num_splits


@triton.jit  # type: ignore[untyped-decorator]
def _first_own(  # type: ignore[no-untyped-def]
    prefix_ends,
    seqs,
    mask,
    contexts,
    num_seqs,
    window: tl.constexpr,
    HAS_PREFIXES: tl.constexpr,
    split_weight: tl.constexpr,
    least_splits: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # -> (the first position that the sequences read themselves, splits of those that they share)
    first = contexts * 0
    num_splits = first
    if window > 0:
        first = tl.maximum(contexts - window, 0)
    if HAS_PREFIXES:
        first, num_splits = shared(
            prefix_ends, seqs, mask, LEVELS, num_seqs, split_weight, least_splits, BLOCK_N
        )
    return first, num_splits


@triton.jit
def locate(place, ends, first_place):  # type: ignore[no-untyped-def]
    # -> (index of the first of `ends` past the place, distance from the end before)
    earlier = ends <= place
    return tl.sum(earlier.to(tl.int32)), place - tl.max(tl.where(earlier, ends, first_place))


@triton.jit  # type: ignore[untyped-decorator]
def look_up(  # type: ignore[no-untyped-def]
    my_table, tile, my_begin, my_context, block_size: tl.constexpr, BLOCK_N: tl.constexpr
):
    # The block of a tile, or of each of its positions where it may lie in several.
    if block_size % BLOCK_N == 0:
        in_sight = tile * BLOCK_N < my_context
        return tl.load(my_table + tile // (block_size // BLOCK_N), in_sight, 0).to(tl.int32)
    else:
        positions = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        in_sight = (positions >= my_begin) & (positions < my_context)
        return tl.load(my_table + positions // block_size, in_sight, 0).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def step(  # type: ignore[no-untyped-def]
    cache,
    blocks,
    tile,
    my_q,
    my_table,
    my_begin,
    my_context,
    my_kv_head,
    best,
    weights_sum,
    acc,
    score_scale,
    rows_per_block,
    num_kv_heads: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    soft_cap: tl.constexpr,
    window: tl.constexpr,
    USE_TMA: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # One tile of the online softmax. Tokens are the rows of scores: they fill the 64 rows of a
    # tensor core's tile, which the few query heads of a KV head would not.
    positions = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if USE_TMA:
        row = blocks * rows_per_block + my_kv_head * block_size + tile * BLOCK_N % block_size
        k = cache.load([row, 0])
        v = cache.load([row + num_kv_heads * block_size, 0])
        if not WHOLE:
            # The copy engine cannot zero slots past the context, and 0 * NaN is NaN.
            v = tl.where((positions < my_context)[:, None], v, 0.0)
        v = tl.trans(v)
    else:
        dims = tl.arange(0, BLOCK_D)
        if block_size % BLOCK_N == 0:
            slots = tile * BLOCK_N % block_size + tl.arange(0, BLOCK_N)
        else:
            slots = positions % block_size
        rows = blocks.to(tl.int64) * rows_per_block + (my_kv_head * block_size + slots)
        in_sight = (positions >= my_begin) & (positions < my_context)
        in_head = dims < head_dim
        k_ptrs = cache + rows[:, None] * head_dim + dims[None, :]
        k = tl.load(k_ptrs, in_sight[:, None] & in_head[None, :], 0.0)
        # Read as it is multiplied: a transposed load would not be pipelined on sm_80.
        v_ptrs = cache + (rows[None, :] + num_kv_heads * block_size) * head_dim + dims[:, None]
        v = tl.load(v_ptrs, in_sight[None, :] & in_head[:, None], 0.0)
    blocks = look_up(my_table, tile + 1, my_begin, my_context, block_size, BLOCK_N)

    scores = tl.dot(k, my_q, input_precision="ieee") * score_scale
    if soft_cap > 0:
        scores = (soft_cap * LOG2E) * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    if not WHOLE or window > 0:
        seen = (positions >= my_begin) & (positions < my_context)
        scores = tl.where(seen[:, None], scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 0))
    shrink = tl.exp2(best - new_best)
    weights = tl.exp2(scores - new_best[None, :])
    # Summed over the tokens once, at the end of the split.
    weights_sum = weights_sum * shrink[None, :] + weights
    acc = tl.dot(v, weights.to(v.dtype), acc * shrink[None, :], input_precision="ieee")
    return blocks, new_best, weights_sum, acc


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
    num_kv_heads: tl.constexpr,
    group_size: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    soft_cap: tl.constexpr,
    window: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_PREFIXES: tl.constexpr,  # and their partial sums
    split_weight: tl.constexpr,
    least_splits: tl.constexpr,
    USE_TMA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # grid: (as many programs as are resident,); program p takes the items p, p + programs, ...
    # item |-> (split, of all sequences', KV head): the heads of a block are read together
    # row |-> a query head of my KV head
    rows = tl.arange(0, BLOCK_R)
    dims = tl.arange(0, BLOCK_D)
    row_mask = rows < group_size
    mask = (dims < head_dim)[:, None] & row_mask[None, :]
    wait_for_predecessor()
    item = tl.program_id(0)
    num_splits = 0
    for first_seq in range(0, num_seqs, LANES):
        seqs = first_seq + tl.arange(0, LANES)
        contexts = tl.load(context_lens + seqs, seqs < num_seqs, 0).to(tl.int32)
        firsts, _ = _first_own(
            prefix_ends,
            seqs,
            seqs < num_seqs,
            contexts,
            num_seqs,
            window,
            HAS_PREFIXES,
            split_weight,
            least_splits,
            BLOCK_N,
        )
        _, _, _, splits = cut(firsts, contexts, split_weight, least_splits, BLOCK_N)
        ends = num_splits + tl.cumsum(tl.where(seqs < num_seqs, splits, 0))
        num_splits_before = num_splits
        num_splits = tl.max(ends)
        while item < num_splits * num_kv_heads:
            my_kv_head = item % num_kv_heads
            index, my_split = locate(item // num_kv_heads, ends, num_splits_before)
            my_seq = (first_seq + index).to(tl.int64)
            my_context = tl.load(context_lens + my_seq).to(tl.int32)
            my_first, num_before = _first_own(
                prefix_ends,
                my_seq,
                my_seq >= 0,
                my_context,
                num_seqs,
                window,
                HAS_PREFIXES,
                split_weight,
                least_splits,
                BLOCK_N,
            )
            my_tile, my_end, split_tiles, my_splits = cut(
                my_first, my_context, split_weight, least_splits, BLOCK_N
            )
            my_begin = 0
            if window > 0:
                my_begin = my_first
            my_tile += my_split * split_tiles
            my_end = tl.minimum(my_tile + split_tiles, my_end)
            my_table = block_tables + my_seq * tables_stride_seq
            heads = my_kv_head * group_size + rows
            q_rows = q + my_seq * q_stride_token + heads * q_stride_head
            my_q = tl.load(q_rows[None, :] + dims[:, None], mask, 0.0)

            best = tl.full([BLOCK_R], NOTHING_SEEN, tl.float32)
            weights_sum = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
            acc = tl.zeros([BLOCK_D, BLOCK_R], tl.float32)
            blocks = look_up(my_table, my_tile, my_begin, my_context, block_size, BLOCK_N)
            # With TMA, a tile that the query does not see whole comes last, in a loop with masks.
            # The loops' stages are the launch's: as options of tl.range they would apply to the
            # look-ups of blocks too, and each step would wait for its own. A block is looked up one
            # step ahead, mostly in L1: sixteen ordinals share a line.
            whole_end = my_end
            if USE_TMA:
                whole_end = tl.maximum(tl.minimum(my_end, my_context // BLOCK_N), my_tile)
            for tile in range(my_tile, whole_end):
                blocks, best, weights_sum, acc = step(
                    cache,
                    blocks,
                    tile,
                    my_q,
                    my_table,
                    my_begin,
                    my_context,
                    my_kv_head,
                    best,
                    weights_sum,
                    acc,
                    score_scale,
                    rows_per_block,
                    num_kv_heads,
                    block_size,
                    head_dim,
                    soft_cap,
                    window,
                    USE_TMA,
                    USE_TMA,
                    BLOCK_N,
                    BLOCK_D,
                )
            for tile in range(whole_end, my_end):
                blocks, best, weights_sum, acc = step(
                    cache,
                    blocks,
                    tile,
                    my_q,
                    my_table,
                    my_begin,
                    my_context,
                    my_kv_head,
                    best,
                    weights_sum,
                    acc,
                    score_scale,
                    rows_per_block,
                    num_kv_heads,
                    block_size,
                    head_dim,
                    soft_cap,
                    window,
                    USE_TMA,
                    False,
                    BLOCK_N,
                    BLOCK_D,
                )
            total = tl.sum(weights_sum, 0)

            all_splits = num_before + my_splits
            finished = all_splits == 1
            if all_splits > 1:
                pair = my_seq * num_kv_heads + my_kv_head
                pair_rows = partials + (pair * max_splits * group_size + rows) * (head_dim + STATS)
                mine = pair_rows + (num_before + my_split) * (group_size * (head_dim + STATS))
                tl.store(mine[None, :] + dims[:, None], acc, mask)
                tl.store(mine + head_dim, best, row_mask)
                tl.store(mine + head_dim + 1, total, row_mask)
                # All threads have written before the one that counts releases what they wrote.
                tl.debug_barrier()
                finished = tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == my_splits - 1
                if finished:
                    tl.store(arrivals + pair, 0)
                    best, total, acc = _add_up(
                        pair_rows,
                        all_splits,
                        row_mask,
                        mask,
                        group_size,
                        head_dim,
                        BLOCK_R,
                        BLOCK_D,
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
def _add_up(  # type: ignore[no-untyped-def]
    pair_rows,
    num_splits,
    row_mask,
    mask,
    group_size: tl.constexpr,
    head_dim: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # In the order of splits, whichever finished last. Past L1, which may hold stale values.
    best = tl.full([BLOCK_R], NOTHING_SEEN, tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_R], tl.float32)
    dims = tl.arange(0, BLOCK_D)[:, None]
    for split in tl.range(num_splits, loop_unroll_factor=4):
        other = pair_rows + split * (group_size * (head_dim + STATS))
        other_best = tl.load(other + head_dim, row_mask, NOTHING_SEEN, cache_modifier=".cg")
        other_total = tl.load(other + head_dim + 1, row_mask, 0.0, cache_modifier=".cg")
        other_acc = tl.load(other[None, :] + dims, mask, 0.0, cache_modifier=".cg")
        new_best = tl.maximum(best, other_best)
        shrink, share = tl.exp2(best - new_best), tl.exp2(other_best - new_best)
        total = total * shrink + other_total * share
        acc = acc * shrink[None, :] + other_acc * share[None, :]
        best = new_best
    return best, total, acc
