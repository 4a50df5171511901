"""The device code of tandem.kernels.attention.decode for prefixes that sequences share."""

import triton
import triton.language as tl

from tandem.kernels.attention.decode_kernel import (
    LANES,
    LEVELS,
    NOTHING_SEEN,
    STATS,
    cut,
    locate,
    look_up,
    shared,
    step,
)
from tandem.kernels.dependent_launch import wait_for_predecessor


@triton.jit(do_not_specialize=["num_seqs", "max_splits", "tables_stride_seq"])  # type: ignore[untyped-decorator]
def shared_prefix_kernel(  # type: ignore[no-untyped-def]
    q,  # [num_seqs, num_heads, head_dim]
    cache,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], or a descriptor of its rows
    block_tables,  # [num_seqs, max_blocks]
    prefix_seqs,  # [LEVELS, num_seqs] as the next two: see SharedPrefixes
    prefix_counts,  # [LEVELS, num_seqs]
    prefix_ends,  # [LEVELS, num_seqs]
    partials,  # [num_seqs, num_kv_heads, max_splits, group_size, head_dim + 4]
    score_scale,
    num_seqs,
    max_splits,
    q_stride_token,
    q_stride_head,
    rows_per_block,
    tables_stride_seq,
    num_kv_heads: tl.constexpr,
    group_size: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    soft_cap: tl.constexpr,
    split_weight: tl.constexpr,
    least_splits: tl.constexpr,
    USE_TMA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # grid: (as many programs as are resident,); program p takes the items p, p + programs, ...
    # item |-> (split, of all groups', KV head): groups with the same prefix run side by side
    # row |-> (sequence of the group, query head of my KV head)
    rows = tl.arange(0, BLOCK_R)
    dims = tl.arange(0, BLOCK_D)
    members = rows // group_size
    row_heads = rows % group_size
    wait_for_predecessor()
    item = tl.program_id(0)
    num_splits = 0
    for first_place in range(0, num_seqs * LEVELS, LANES):
        places = first_place + tl.arange(0, LANES)
        is_group = tl.load(prefix_counts + places, places < num_seqs * LEVELS, 0) > 0
        seqs = tl.load(prefix_seqs + places, is_group, 0)
        levels = places // num_seqs
        begins, _ = shared(
            prefix_ends, seqs, is_group, levels, num_seqs, split_weight, least_splits, BLOCK_N
        )
        prefixes = tl.load(prefix_ends + levels * num_seqs + seqs, is_group, 0).to(tl.int32)
        _, _, _, splits = cut(
            begins, tl.maximum(prefixes, begins), split_weight, least_splits, BLOCK_N
        )
        ends = num_splits + tl.cumsum(tl.where(is_group, splits, 0))
        num_splits_before = num_splits
        num_splits = tl.max(ends)
        while item < num_splits * num_kv_heads:
            my_kv_head = item % num_kv_heads
            index, my_split = locate(item // num_kv_heads, ends, num_splits_before)
            my_place = first_place + index
            my_level = my_place // num_seqs
            my_seq = tl.load(prefix_seqs + my_place)
            my_begin, splits_before = shared(
                prefix_ends,
                my_seq,
                my_seq >= 0,
                my_level,
                num_seqs,
                split_weight,
                least_splits,
                BLOCK_N,
            )
            my_prefix = tl.load(prefix_ends + my_level * num_seqs + my_seq).to(tl.int32)
            my_tile, my_end, split_tiles, _splits = cut(
                my_begin, my_prefix, split_weight, least_splits, BLOCK_N
            )
            my_tile += my_split * split_tiles
            my_end = tl.minimum(my_tile + split_tiles, my_end)
            my_table = block_tables + my_seq * tables_stride_seq
            is_row = members < tl.load(prefix_counts + my_place)
            row_seqs = tl.load(prefix_seqs + my_place + members, is_row, 0)
            mask = (dims < head_dim)[:, None] & is_row[None, :]
            q_rows = q + row_seqs * q_stride_token
            q_rows += (my_kv_head * group_size + row_heads) * q_stride_head
            my_q = tl.load(q_rows[None, :] + dims[:, None], mask, 0.0)

            best = tl.full([BLOCK_R], NOTHING_SEEN, tl.float32)
            weights_sum = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
            acc = tl.zeros([BLOCK_D, BLOCK_R], tl.float32)
            blocks = look_up(my_table, my_tile, 0, my_prefix, block_size, BLOCK_N)
            for tile in range(my_tile, my_end):
                blocks, best, weights_sum, acc = step(
                    cache,
                    blocks,
                    tile,
                    my_q,
                    my_table,
                    0,
                    my_prefix,
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
                    0,
                    USE_TMA,
                    True,
                    BLOCK_N,
                    BLOCK_D,
                )
            total = tl.sum(weights_sum, 0)
            # Each sequence has the partial sums as if it were alone.
            mine = (row_seqs * num_kv_heads + my_kv_head) * max_splits + splits_before + my_split
            mine = partials + (mine * group_size + row_heads) * (head_dim + STATS)
            tl.store(mine[None, :] + dims[:, None], acc, mask)
            tl.store(mine + head_dim, best, is_row)
            tl.store(mine + head_dim + 1, total, is_row)
            item += tl.num_programs(0)
