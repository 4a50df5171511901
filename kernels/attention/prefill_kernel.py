"""The device code of tandem.kernels.attention.prefill."""

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))
WHOLE = tl.constexpr(1)  # the phase between tiles cut by the window and by the causal mask
NO_SCORE = tl.constexpr(-1.0e30)  # the maximum of nothing: finite, so that differences are numbers


@triton.jit  # type: ignore[untyped-decorator]
def _load_rows(  # type: ignore[no-untyped-def]
    source,  # [num_rows, head_dim], or a descriptor of them
    rows,  # the first of BLOCK_N, or every one
    head_dim: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
    ALL: tl.constexpr,
):
    """Load keys or values [BLOCK_N, BLOCK_D]; zeros for rows below 0, unless ALL are valid."""
    if USE_TMA:
        return source.load([rows, 0])
    else:
        dims = tl.arange(0, BLOCK_D)
        mask = (dims < head_dim)[None, :] & ((rows >= 0)[:, None] | ALL)
        return tl.load(
            source + rows.to(tl.int64)[:, None] * head_dim + dims[None, :], mask=mask, other=0.0
        )


@triton.jit  # type: ignore[untyped-decorator]
def _is_after(last, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return [BLOCK_M, BLOCK_N], True where column > last[row].

    A thread holds the same two of every eight columns of a tile of scores: in 8 * octet + rest the
    octet is a constant. Comparing whole columns would take a register for each.
    """
    octets = tl.arange(0, BLOCK_N // 8) * 8
    rests = last[:, None] - tl.arange(0, 8)[None, :]
    return (octets[None, :, None] > rests[:, None, :]).reshape(BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["num_seqs", "num_tiles", "tables_stride_seq"])  # type: ignore[untyped-decorator]
def prefill_kernel(  # type: ignore[no-untyped-def]
    q,  # [num_tokens, num_heads, head_dim]
    source,  # [num_rows, head_dim] rows of the cache, or a descriptor of them
    block_tables,  # [num_seqs, max_blocks]
    cu_seqlens_q,  # [num_seqs + 1]
    context_lens,  # [num_seqs]
    sinks,  # [num_heads] where HAS_SINKS
    out,  # [num_tokens, num_heads, head_dim]
    scale,
    num_seqs,
    num_tiles,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    USE_TMA: tl.constexpr,
    PERSISTENT: tl.constexpr,
):
    # grid: (num_programs,), each takes items (tile of rows, KV head) in turn, the last tiles first:
    # they see the most. The program with the heaviest item of a turn gets the lightest of the next.
    # row |-> (query token row // group_size, head row % group_size of my KV head)
    my_program, num_programs = tl.program_id(0), tl.num_programs(0)
    turns = tl.cdiv(num_tiles * num_kv_heads, num_programs) if PERSISTENT else 1
    # Exponents are to base 2; a soft cap brings the factor in itself.
    score_scale = scale * LOG2_E if soft_cap == 0.0 else 1.0
    for turn in range(turns):
        my_place = my_program if turn % 2 == 0 else num_programs - 1 - my_program
        my_item = turn * num_programs + my_place
        my_kv_head = my_item % num_kv_heads
        tile = num_tiles - 1 - my_item // num_kv_heads  # negative past the last item
        my_seq, next_seq, first_tile = 0, num_seqs, 0  # the last sequence to begin by my tile
        while next_seq - my_seq > 1:
            seq = (my_seq + next_seq) // 2
            begin = tl.load(cu_seqlens_q + seq).to(tl.int32) * group_size // BLOCK_M + seq
            if begin <= tile:
                my_seq, first_tile = seq, begin
            else:
                next_seq = seq
        my_first_token = tl.load(cu_seqlens_q + my_seq).to(tl.int64)
        my_query_len = (tl.load(cu_seqlens_q + my_seq + 1) - my_first_token).to(tl.int32)
        my_first_row = (tile - first_tile) * BLOCK_M
        if (tile >= 0) & (my_first_row < my_query_len * group_size):
            my_context = tl.load(context_lens + my_seq).to(tl.int32)
            my_table = block_tables + my_seq * tables_stride_seq
            my_row = my_kv_head * block_size
            rows, dims = my_first_row + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
            tokens, heads = rows // group_size, my_kv_head * group_size + rows % group_size
            my_rows = (my_first_token + tokens) * q_stride_token + heads * q_stride_head
            mask = (tokens < my_query_len)[:, None] & (dims < head_dim)[None, :]
            my_q = tl.load(q + my_rows[:, None] + dims[None, :], mask=mask, other=0.0)
            my_offset = my_context - my_query_len  # position of the first query
            my_positions = my_offset + (my_first_row + tl.arange(0, BLOCK_M)) // group_size
            my_first = my_offset + my_first_row // group_size
            my_last = my_offset + (my_first_row + BLOCK_M - 1) // group_size
            my_end = tl.minimum(my_context, my_last + 1)
            num_steps = tl.cdiv(my_end, BLOCK_N)
            first_step = tl.maximum(my_first - window + 1, 0) // BLOCK_N if window else 0
            # Steps [whole_begin, whole_end) are seen whole by every row.
            whole_begin = tl.cdiv(tl.maximum(my_last - window + 1, 0), BLOCK_N) if window else 0
            whole_begin = tl.minimum(whole_begin, num_steps)
            whole_end = tl.maximum((my_first + 1) // BLOCK_N, whole_begin)

            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            best = tl.full([BLOCK_M], NO_SCORE, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            shrink = tl.full([BLOCK_M], 1.0, tl.float32)
            # The values of a tile are weighed a step after its keys were scored: on Hopper the
            # tensor cores do it while the exponentials of that step are taken. The first step
            # weighs zeros: rows -1 and below do not exist.
            weights = tl.zeros([BLOCK_M, BLOCK_N], my_q.dtype)
            value_rows = -BLOCK_N
            if not USE_TMA:
                at = first_step * BLOCK_N + tl.arange(0, BLOCK_N)
                if window:
                    at = tl.maximum(at, my_first - window + 1)
                blocks = tl.load(my_table + at // block_size, mask=at < my_end, other=0)
                value_rows = blocks.to(tl.int32) * rows_per_block + (my_row + at % block_size)
                value_rows = tl.where(at < my_end, value_rows, -BLOCK_N)
            for phase in tl.static_range(0 if window else WHOLE, WHOLE + 2):
                begin = first_step if phase == 0 else whole_begin if phase == WHOLE else whole_end
                end = whole_begin if phase == 0 else whole_end if phase == WHOLE else num_steps
                for step in tl.range(begin, end, num_stages=STAGES):
                    start = step * BLOCK_N
                    at = start if USE_TMA else start + tl.arange(0, BLOCK_N)
                    if window and phase == 0 and not USE_TMA:
                        # Blocks before the window may be another sequence's: 0 * NaN is NaN.
                        at = tl.maximum(at, my_first - window + 1)
                    is_there = (at < my_end) | (phase == WHOLE)
                    blocks = tl.load(my_table + at // block_size, mask=is_there, other=0)
                    key_rows = blocks.to(tl.int32) * rows_per_block + (my_row + at % block_size)
                    k = _load_rows(source, key_rows, head_dim, BLOCK_D, USE_TMA, True)
                    scores = tl.dot(my_q, k.T, input_precision="ieee")
                    v = _load_rows(source, value_rows, head_dim, BLOCK_D, USE_TMA, phase == WHOLE)
                    acc = acc * shrink[:, None]
                    # An operand straight from the last step would go through shared memory, and
                    # its wgmma would be waited for: an addition keeps it in registers.
                    held = weights + tl.zeros([1, 1], weights.dtype)
                    acc = tl.dot(held, v, acc, input_precision="ieee")
                    if soft_cap != 0.0:
                        grown = tl.exp2(scores * (scale * (2.0 / soft_cap) * LOG2_E))
                        scores = (1.0 - 2.0 / (1.0 + grown)) * (soft_cap * LOG2_E)
                    if phase != WHOLE:
                        hidden = _is_after(my_positions - start, BLOCK_M, BLOCK_N)
                        scores = tl.where(hidden, float("-inf"), scores)
                        if window:
                            seen = _is_after(my_positions - window - start, BLOCK_M, BLOCK_N)
                            scores = tl.where(seen, scores, float("-inf"))
                    new_best = tl.maximum(best, tl.max(scores, 1))
                    shrink = tl.exp2((best - new_best) * score_scale)
                    fractions = tl.exp2(scores * score_scale - (new_best * score_scale)[:, None])
                    total = total * shrink + tl.sum(fractions, 1)
                    best = new_best
                    weights = fractions.to(weights.dtype)
                    value_rows = key_rows + num_kv_heads * block_size
                    if not USE_TMA and phase != WHOLE:
                        value_rows = tl.where(at < my_end, value_rows, -BLOCK_N)
            v = _load_rows(source, value_rows, head_dim, BLOCK_D, USE_TMA, False)
            if USE_TMA:  # the copy engine also loads slots past the context
                positions = (num_steps - 1) * BLOCK_N + tl.arange(0, BLOCK_N)
                v = tl.where((positions < my_context)[:, None], v, 0.0)
            acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
            # This adds 0. The compiler cannot know, so it does not keep q's offsets for out's.
            my_first_row += tl.minimum(my_end, 0)
            rows, dims = my_first_row + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
            tokens, heads = rows // group_size, my_kv_head * group_size + rows % group_size
            my_rows = (my_first_token + tokens) * out_stride_token + heads * out_stride_head
            mask = (tokens < my_query_len)[:, None] & (dims < head_dim)[None, :]
            if HAS_SINKS:
                sink = tl.load(sinks + heads).to(tl.float32) * LOG2_E
                origin = tl.maximum(best * score_scale, sink)
                shrink = tl.exp2(best * score_scale - origin)
                total = total * shrink + tl.exp2(sink - origin)
                acc *= shrink[:, None]
            my_out = out + my_rows[:, None] + dims[None, :]
            attended = acc * (1.0 / total)[:, None]
            tl.store(my_out, attended.to(out.dtype.element_ty), mask=mask)
