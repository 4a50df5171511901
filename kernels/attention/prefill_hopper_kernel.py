"""The prefill attention kernel for sm_90 in Gluon: a producer warp and two consumer warpgroups.

The producer takes items from a counter that all programs share, and has the copy engine bring
queries, keys and values into shared memory, the next item's while one is computed; each consumer
holds 64 queries' scores and results in registers, and lets the tensor cores work on the next
scores and the last values while it computes a softmax (FlashAttention-3, arXiv 2407.08608).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(64)  # query tokens of a consumer: the rows of one wgmma
TILE_ROWS = gl.constexpr(128)  # query tokens of an item
TILE_TOKENS = gl.constexpr(128)  # context positions per step of the online softmax
SWIZZLE = gl.constexpr(64)  # elements in 128 bytes: the width of a TMA box
# 232 * 256 + 40 * 128 threads' registers fill the file; 24 are too few for blocks of 16 tokens.
CONSUMER_REGISTERS = gl.constexpr(232)
PRODUCER_REGISTERS = gl.constexpr(40)
QUERY_STAGES = gl.constexpr(2)  # items in shared memory: the one computed, and the next
FIELDS = gl.constexpr(5)  # of an item, for the consumers
GRANULE = gl.constexpr(8)  # rows after which the 128-byte swizzle repeats
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


@gluon.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["table_stride", "num_seqs", "last_tile", "num_items", "num_records"]
)
def prefill_hopper_kernel(  # type: ignore[no-untyped-def]
    q,  # boxes [ROWS, 64] of [num_tokens, num_heads * head_dim]
    records,  # boxes [min(block_size, TILE_TOKENS), 64] of [num_records, head_dim]
    counter,  # int32, zero between launches: items taken beyond each program's first
    batch,  # block_tables [num_seqs, max_blocks], cu_seqlens_q, context_lens
    table_stride,  # of a sequence's table; not in a tuple, where it would be specialized
    num_seqs,
    last_tile,
    num_items,
    num_records,
    strides,  # of q's heads; in records: of blocks, of K to V
    result,  # out [num_tokens, num_heads, head_dim], strides of tokens and heads, scale * log2(e)
    num_heads: gl.constexpr,
    group_size: gl.constexpr,
    block_size: gl.constexpr,
    head_dim: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
):
    # grid: (min(multiprocessors, items),); an item is a tile of queries and a head: _find_item
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    my_q = gl.allocate_shared_memory(q.dtype, [2 * QUERY_STAGES, ROWS, head_dim], layout)
    my_keys = gl.allocate_shared_memory(q.dtype, [STAGES, TILE_TOKENS, head_dim], layout)
    my_values = gl.allocate_shared_memory(q.dtype, [STAGES, TILE_TOKENS, head_dim], layout)
    fields: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    my_items = gl.allocate_shared_memory(gl.int32, [QUERY_STAGES * FIELDS, 1], fields)
    tiles = (my_q, my_keys, my_values)
    # full: the copy engine has filled it; free: both consumers have read it. An item comes and goes
    # with its queries, and the keys of a load become free with the values of the load before it.
    q_full, q_free = _barriers(QUERY_STAGES, 1), _barriers(QUERY_STAGES, 2)
    k_full, v_full, free = _barriers(STAGES, 1), _barriers(STAGES, 1), _barriers(STAGES, 2)
    landed = _barriers(1, 1)  # values of which the producer has yet to clear some
    turns = _barriers(2, 1)  # a consumer's turn to issue products
    signals = (q_full, q_free, k_full, v_full, free, landed, turns)
    work = (counter, num_items, batch, table_stride, num_seqs, last_tile, num_heads)
    pool = (records, num_records, strides[1])
    gl.warp_specialize(
        [
            (_consume, (0, my_items, tiles, signals, result, TURNS)),
            (_consume, (1, my_items, tiles, signals, result, TURNS)),
            (_produce, (work, my_items, tiles, signals, q, pool, strides, group_size, block_size)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _barriers(count: gl.constexpr, arrivals: gl.constexpr):  # type: ignore[no-untyped-def]
    barriers = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for one in gl.static_range(count):
        mbarrier.init(barriers.index(one), count=arrivals)
    return barriers


@gluon.jit
def _take_item(work):  # type: ignore[no-untyped-def]
    # The next item that no program has; at or past num_items: there is none.
    counter, num_items, _batch, _table_stride, _num_seqs, _last_tile, _num_heads = work
    taken = gl.atomic_add(counter, 1, sem="relaxed")
    if taken == num_items - 1:  # each program is refused once, and this is the last of them
        gl.store(counter, 0)
    return gl.num_programs(0) + taken


# What the producer tells of an item: its head, its first row in q, the rows from there on, the
# position of the first, and its steps; none at the end.
@gluon.jit
def _post(my_items, items, values):  # type: ignore[no-untyped-def]
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for field in gl.static_range(FIELDS):
        value = gl.full([1], values[field], gl.int32, layout)  # every lane stores it
        my_items.index(items % QUERY_STAGES * FIELDS + field).store(value)


@gluon.jit
def _await_item(my_items, items, q_full):  # type: ignore[no-untyped-def]
    place = items % QUERY_STAGES
    mbarrier.wait(q_full.index(place), items // QUERY_STAGES & 1)
    place *= FIELDS
    head, row = _read(my_items, place), _read(my_items, place + 1)
    num_rows, position = _read(my_items, place + 2), _read(my_items, place + 3)
    return head, row, num_rows, position, _read(my_items, place + 4)


@gluon.jit
def _read(my_items, ordinal):  # type: ignore[no-untyped-def]
    return gl.max(my_items.index(ordinal).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _find_item(my_item, work):  # type: ignore[no-untyped-def]
    # The last tiles of a sequence, its heaviest, have the first items.
    _counter, _num_items, batch, table_stride, num_seqs, last_tile, num_heads = work
    block_tables, cu_seqlens_q, context_lens = batch
    my_head = my_item % num_heads
    tile = last_tile - my_item // num_heads
    # Tiles of sequence s begin at cu_seqlens_q[s] // TILE_ROWS + s: room enough for all of it.
    my_seq = 0
    above = num_seqs
    while above - my_seq > 1:
        middle = (my_seq + above) // 2
        if gl.load(cu_seqlens_q + middle).to(gl.int32) // TILE_ROWS + middle <= tile:
            my_seq = middle
        else:
            above = middle
    my_first = gl.load(cu_seqlens_q + my_seq).to(gl.int32)
    my_query_len = gl.load(cu_seqlens_q + my_seq + 1).to(gl.int32) - my_first
    my_context = gl.load(context_lens + my_seq).to(gl.int32)
    my_token = (tile - my_first // TILE_ROWS - my_seq) * TILE_ROWS
    my_end = my_context - my_query_len + gl.minimum(my_query_len, my_token + TILE_ROWS)
    my_steps = (my_end + TILE_TOKENS - 1) // TILE_TOKENS
    if (tile < 0) | (my_token >= my_query_len):
        my_steps = 0
    my_table = block_tables + gl.to_tensor(my_seq).to(gl.int64) * table_stride
    return my_head, my_table, my_first, my_token, my_query_len, my_context, my_steps


@gluon.jit  # type: ignore[untyped-decorator]
def _produce(  # type: ignore[no-untyped-def]
    work,
    my_items,
    tiles,
    signals,
    q,
    pool,
    strides,
    group_size: gl.constexpr,
    block_size: gl.constexpr,
):
    my_q, my_keys, my_values = tiles
    q_full, q_free, k_full, v_full, free, landed, _turns = signals
    q_stride_head, _block_records, kv_records = strides
    STAGES: gl.constexpr = my_keys.shape[0]
    head_dim: gl.constexpr = my_keys.shape[2]
    items = 0
    loads = 0
    clearings = 0
    item = gl.program_id(0)
    while item < work[1]:
        head, table, first, token, query_len, context, steps = _find_item(item, work)
        if steps > 0:
            place = items % QUERY_STAGES
            mbarrier.wait(q_free.index(place), (items // QUERY_STAGES & 1) ^ 1)
            position = context - query_len + token
            _post(my_items, items, (head, first + token, query_len - token, position, steps))
            mbarrier.expect(q_full.index(place), TILE_ROWS * head_dim * 2)
            for half in gl.static_range(2):
                row = first + token + half * ROWS
                for column in gl.static_range(head_dim // SWIZZLE):
                    corner = [row, head * q_stride_head + column * SWIZZLE]
                    box = _box(my_q.index(2 * place + half), column, ROWS)
                    tma.async_copy_global_to_shared(q, corner, q_full.index(place), box)
            items += 1
            k_base = head // group_size * block_size  # records from a block's first to my keys
            v_base = k_base + kv_records
            for step in range(steps):
                slot = loads % STAGES
                loads += 1
                keys, values = my_keys.index(slot), my_values.index(slot)
                start = step * TILE_TOKENS
                where = (table, start, context)
                # The slot's keys are free since the wait for room for the values before.
                _load(pool, k_base, where, keys, k_full.index(slot), block_size)
                mbarrier.wait(free.index(loads % STAGES), (loads // STAGES & 1) ^ 1)
                if (start + TILE_TOKENS > context) & (context % block_size != 0):
                    # Weights of slots past the context are 0, but 0 * NaN is not.
                    _load(pool, v_base, where, values, landed.index(0), block_size)
                    mbarrier.wait(landed.index(0), clearings & 1)
                    clearings += 1
                    _clear_rows(values, context - start, block_size)
                    fence_async_shared()
                    mbarrier.arrive(v_full.index(slot), count=1)
                else:
                    _load(pool, v_base, where, values, v_full.index(slot), block_size)
        item = _take_item(work)
    place = items % QUERY_STAGES
    mbarrier.wait(q_free.index(place), (items // QUERY_STAGES & 1) ^ 1)
    _post(my_items, items, (0, 0, 0, 0, 0))
    mbarrier.arrive(q_full.index(place), count=1)


@gluon.jit  # type: ignore[untyped-decorator]
def _load(pool, base, where, tile, full, block_size: gl.constexpr):  # type: ignore[no-untyped-def]
    # Positions [start, start + TILE_TOKENS), block by block. Blocks past the context come as
    # zeros: boxes past the last record.
    records, num_records, block_records = pool
    table, start, context = where
    mbarrier.expect(full, TILE_TOKENS * tile.shape[1] * 2)
    BOX_ROWS: gl.constexpr = min(block_size, TILE_TOKENS)
    BOXES: gl.constexpr = TILE_TOKENS // BOX_ROWS
    for part in gl.static_range(BOXES):
        position = start + part * BOX_ROWS
        inside = position < context
        block = gl.load(table + position // block_size, mask=inside, other=0).to(gl.int32)
        row = gl.where(inside, block * block_records + base + position % block_size, num_records)
        for column in gl.static_range(tile.shape[1] // SWIZZLE):
            box = _box(tile, column * BOXES + part, BOX_ROWS)
            tma.async_copy_global_to_shared(records, [row, column * SWIZZLE], full, box)


@gluon.jit  # type: ignore[untyped-decorator]
def _box(tile, ordinal, rows: gl.constexpr):  # type: ignore[no-untyped-def]
    # [rows, 64] of a tile, counted down its first 64 columns, then down the next: as they lie.
    count: gl.constexpr = tile.shape[0] * tile.shape[1] // (rows * SWIZZLE)
    return tile._reinterpret(tile.dtype, [count, rows, SWIZZLE], tile.layout).index(ordinal)


@gluon.jit  # type: ignore[untyped-decorator]
def _clear_rows(tile, end, block_size: gl.constexpr):  # type: ignore[no-untyped-def]
    # Of the block that ends past row `end`; what follows it is zeros.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    GRANULES: gl.constexpr = TILE_TOKENS // GRANULE
    BOX_ROWS: gl.constexpr = min(block_size, TILE_TOKENS)
    rows = gl.arange(0, GRANULE, layout=gl.SliceLayout(1, layout))
    for granule in range(end // GRANULE, gl.cdiv(end, BOX_ROWS) * BOX_ROWS // GRANULE):
        for column in gl.static_range(tile.shape[1] // SWIZZLE):
            box = _box(tile, column * GRANULES + granule, GRANULE)
            value = box.load(layout)
            kept = (granule * GRANULE + rows < end)[:, None]
            box.store(gl.where(kept, value, gl.zeros_like(value)))


@gluon.jit  # type: ignore[untyped-decorator]
def _consume(  # type: ignore[no-untyped-def]
    me: gl.constexpr, my_items, tiles, signals, result, TURNS: gl.constexpr
):
    my_q, my_keys, my_values = tiles
    q_full, q_free, k_full, v_full, free, _landed, turns = signals
    out, out_stride_token, out_stride_head, scale = result
    STAGES: gl.constexpr = my_keys.shape[0]
    head_dim: gl.constexpr = my_keys.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    lanes: gl.constexpr = head_dim // 8
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
    dims = gl.arange(0, head_dim, layout=gl.SliceLayout(0, wide))
    items = 0
    loads = 0
    head, row, num_rows, position, steps = _await_item(my_items, items, q_full)
    while steps > 0:
        place = items % QUERY_STAGES
        my_tiles = (my_q.index(2 * place + me), my_keys, my_values)
        row += me * ROWS
        num_rows -= me * ROWS
        position += me * ROWS  # of my first query
        # Steps of which all my queries see every key. Position 0 is seen by all of them, so `best`
        # is finite after the first step.
        open_steps = gl.minimum((position + 1) // TILE_TOKENS, steps)
        slot = loads % STAGES
        mbarrier.wait(k_full.index(slot), loads // STAGES & 1)
        if TURNS:
            mbarrier.wait(turns.index(me), (loads & 1) ^ (1 - me))
        scores = _issue_scores(my_tiles[0], my_keys.index(slot))
        if TURNS:
            mbarrier.arrive(turns.index(1 - me), count=1)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(free.index(slot), count=1)
        scores = _hide(scores, 0, position)
        best = gl.max(scores, 1)
        weights = gl.exp2(scores * scale - (best * scale)[:, None])
        total = gl.sum(weights, 1)
        weights = gl.convert_layout(weights.to(my_values.dtype), operand)
        acc = gl.zeros([ROWS, head_dim], gl.float32, layout)
        state = (acc, weights, best, total)
        for step in range(1, open_steps):
            where = (step, loads, position)
            state = _step(False, me, where, my_tiles, signals, state, scale, operand, TURNS)
            loads += 1
        for step in range(gl.maximum(open_steps, 1), steps):
            where = (step, loads, position)
            state = _step(True, me, where, my_tiles, signals, state, scale, operand, TURNS)
            loads += 1
        acc, weights, best, total = state
        mbarrier.arrive(q_free.index(place), count=1)
        slot = loads % STAGES
        mbarrier.wait(v_full.index(slot), loads // STAGES & 1)
        acc = warpgroup_mma(weights, my_values.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        loads += 1
        total = gl.convert_layout(total, gl.SliceLayout(1, layout))
        normed = gl.convert_layout((acc / total[:, None]).to(my_values.dtype), wide)
        places = (row + rows).to(gl.int64)[:, None] * out_stride_token
        places = places + (head * out_stride_head + dims)[None, :]
        gl.store(out + places, normed, mask=(rows < num_rows)[:, None])
        items += 1
        head, row, num_rows, position, steps = _await_item(my_items, items, q_full)


@gluon.jit  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    HIDE: gl.constexpr, me: gl.constexpr, where, tiles, signals, state, scale, operand, TURNS
):
    # Scores of step `step` while the weights of the step before it, load `loads`, meet its values.
    my_queries, my_keys, my_values = tiles
    _q_full, _q_free, k_full, v_full, free, _landed, turns = signals
    step, loads, position = where
    acc, weights, best, total = state
    STAGES: gl.constexpr = my_keys.shape[0]
    slot = loads % STAGES
    phase = loads // STAGES & 1
    next_slot = (loads + 1) % STAGES
    mbarrier.wait(k_full.index(next_slot), (loads + 1) // STAGES & 1)
    if TURNS:
        mbarrier.wait(turns.index(me), ((loads + 1) & 1) ^ (1 - me))
    scores = _issue_scores(my_queries, my_keys.index(next_slot))
    mbarrier.wait(v_full.index(slot), phase)
    acc = warpgroup_mma(weights, my_values.index(slot), acc, is_async=True)
    if TURNS:
        mbarrier.arrive(turns.index(1 - me), count=1)
    scores = warpgroup_mma_wait(1, deps=[scores])
    if HIDE:
        scores = _hide(scores, step, position)
    new_best = gl.maximum(best, gl.max(scores, 1))
    shrink = gl.exp2((best - new_best) * scale)
    new_weights = gl.exp2(scores * scale - (new_best * scale)[:, None])
    total = total * shrink + gl.sum(new_weights, 1)
    # Long true, but a branch: ptxas moves the wait for the product ahead of the arithmetic above,
    # which is to run beside it, unless a branch lies between them.
    mbarrier.wait(v_full.index(slot), phase)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index(next_slot), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, operand.parent))[:, None]
    weights = gl.convert_layout(new_weights.to(my_values.dtype), operand)
    return acc, weights, new_best, total


@gluon.jit
def _issue_scores(my_queries, keys):  # type: ignore[no-untyped-def]
    nothing = gl.zeros([ROWS, TILE_TOKENS], gl.float32, SCORES)
    return warpgroup_mma(my_queries, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _hide(scores, step, position):  # type: ignore[no-untyped-def]
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    keys = gl.arange(0, TILE_TOKENS, layout=gl.SliceLayout(0, SCORES))
    seen = (step * TILE_TOKENS + keys)[None, :] <= (position + rows)[:, None]
    return gl.where(seen, scores, float("-inf"))
