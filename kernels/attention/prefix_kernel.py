"""The device code of tandem.kernels.attention.decode for prefixes that sequences share."""

import triton
import triton.language as tl

from tandem.kernels.attention.decode_kernel import LANES, LEVELS, STATS, attend, cut, locate, shared
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
    SHAPE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    # grid: (as many programs as are resident,); program p takes the items p, p + programs, ...
    # item |-> (split, of all groups', KV head): groups with the same prefix run side by side
    # row |-> (sequence of the group, query head of my KV head)
    rows = tl.arange(0, BLOCK_R)
    dims = tl.arange(0, SHAPE.padded_dim)
    members = rows // SHAPE.group_size
    row_heads = rows % SHAPE.group_size
    wait_for_predecessor()
    item = tl.program_id(0)
    num_splits = 0
    for first_place in range(0, num_seqs * LEVELS, LANES):
        places = first_place + tl.arange(0, LANES)
        is_group = tl.load(prefix_counts + places, places < num_seqs * LEVELS, 0) > 0
        seqs = tl.load(prefix_seqs + places, is_group, 0)
        levels = places // num_seqs
        begins, _ = shared(prefix_ends, seqs, is_group, levels, num_seqs, SHAPE)
        prefixes = tl.load(prefix_ends + levels * num_seqs + seqs, is_group, 0).to(tl.int32)
        _, _, _, splits = cut(begins, tl.maximum(prefixes, begins), SHAPE)
        ends = num_splits + tl.cumsum(tl.where(is_group, splits, 0))
        num_splits_before = num_splits
        num_splits = tl.max(ends)
        while item < num_splits * SHAPE.num_kv_heads:
            my_kv_head = item % SHAPE.num_kv_heads
            index, my_split = locate(item // SHAPE.num_kv_heads, ends, num_splits_before)
            my_place = first_place + index
            my_level = my_place // num_seqs
            my_seq = tl.load(prefix_seqs + my_place)
            my_begin, splits_before = shared(
                prefix_ends, my_seq, my_seq >= 0, my_level, num_seqs, SHAPE
            )
            my_prefix = tl.load(prefix_ends + my_level * num_seqs + my_seq).to(tl.int32)
            my_tile, my_end, split_tiles, _splits = cut(my_begin, my_prefix, SHAPE)
            my_tile += my_split * split_tiles
            my_end = tl.minimum(my_tile + split_tiles, my_end)
            my_table = block_tables + my_seq * tables_stride_seq
            is_row = members < tl.load(prefix_counts + my_place)
            row_seqs = tl.load(prefix_seqs + my_place + members, is_row, 0)
            mask = (dims < SHAPE.head_dim)[:, None] & is_row[None, :]
            q_rows = q + row_seqs * q_stride_token
            q_rows += (my_kv_head * SHAPE.group_size + row_heads) * q_stride_head
            my_q = tl.load(q_rows[None, :] + dims[:, None], mask, 0.0)

            keys = (cache, rows_per_block, my_table, my_kv_head, 0, my_prefix)
            best, total, acc = attend(
                my_q, score_scale, keys, my_tile, my_end, my_end, SHAPE, True, BLOCK_R
            )
            # Each sequence has the partial sums as if it were alone.
            mine = (
                (row_seqs * SHAPE.num_kv_heads + my_kv_head) * max_splits + splits_before + my_split
            )
            mine = partials + (mine * SHAPE.group_size + row_heads) * (SHAPE.head_dim + STATS)
            tl.store(mine[None, :] + dims[:, None], acc, mask)
            tl.store(mine + SHAPE.head_dim, best, is_row)
            tl.store(mine + SHAPE.head_dim + 1, total, is_row)
            item += tl.num_programs(0)
