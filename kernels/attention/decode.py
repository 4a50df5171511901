"""Decode attention: the last token of each sequence over its paged context.

A sequence's context is cut into splits; (sequence, split, KV head) is an item of work. The grid
depends on shapes alone; its programs share out the items that the lengths on the device make. Where
a sequence has several splits, the program that finishes the last of them adds them up.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tandem.kernels.arrivals import MAX_ARRIVALS, arrivals
from tandem.kernels.attention.decode_kernel import STATS, DecodeShape, paged_decode_kernel
from tandem.kernels.attention.prefix_kernel import shared_prefix_kernel
from tandem.kernels.attention.prefixes import LEVELS, SharedPrefixes, share_prefixes
from tandem.kernels.dependent_launch import launch_options
from tandem.kernels.sizes import cdiv, next_power_of_2
from tandem.kernels.tuned import INTERPRETED, architecture, num_multiprocessors, tuned_config

LOG2_E = math.log2(math.e)
MIN_DOT_ROWS = 16  # tl.dot takes no tile with fewer rows
MAX_SHARED_BYTES = {80: 164 * 1024, 90: 228 * 1024}  # per multiprocessor


@dataclass(frozen=True, slots=True)
class PagedAttentionConfig:
    """The tiles and the grid of a decode kernel."""

    tile_tokens: int = 64  # context positions per step of the online softmax
    num_warps: int = 4
    num_stages: int = 3  # tiles in shared memory: one in work, the rest under way
    blocks_per_sm: int = 2
    # n tiles make splits of about sqrt(n * split_weight) tiles: at 1, as many splits as tiles in
    # each. Few enough that partial sums are small beside the tiles, and short enough alone. Less
    # than 1 is for few sequences on many multiprocessors.
    split_weight: float = 1
    use_tma: bool = True  # where the chip has it and a tile lies within a block
    # Splits short enough that one sequence alone occupies every multiprocessor, at the price of
    # more partial sums where there are many sequences.
    fills_alone: bool = False


@cache
def default_config(head_dim: int, element_bytes: int) -> PagedAttentionConfig:
    """Return the configuration for shapes that are not in the table of tuned ones."""
    if element_bytes > 2:
        return PagedAttentionConfig(tile_tokens=16)  # more would spill: no tensor core adds it up
    padded_dim = next_power_of_2(head_dim)
    return PagedAttentionConfig(
        num_warps=_num_warps(64, padded_dim),
        num_stages=4 if padded_dim <= 64 else 3,
        blocks_per_sm=max(1, min(3, 256 // padded_dim)),
    )


def paged_decode_attention(
    q: torch.Tensor,  # [num_seqs, num_heads, head_dim]
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer
    block_tables: torch.Tensor,  # [num_seqs, max_blocks] (seq, ordinal) |-> block_id
    context_lens: torch.Tensor,  # [num_seqs] positions attended, the query's own included
    scale: float,
    out: torch.Tensor,  # [num_seqs, num_heads, head_dim]
    *,
    soft_cap: float = 0.0,
    window: int = 0,
    sinks: torch.Tensor | None = None,  # [num_heads], float32
    prefixes: SharedPrefixes | None = None,
    config: PagedAttentionConfig | None = None,
) -> None:
    """Let the last token of each sequence attend over its context.

    A sequence without context (padding) gets zeros. With `window`, a query sees that many
    positions, its own the last; with `soft_cap`, scores are soft_cap * tanh(score / soft_cap). A
    sink is one more score of a head, of no position: it takes weight and has no value.
    Entries of `block_tables` past a context are never read, nor is anything in slots past it used.
    A sequence's result is bitwise the same in every batch, but for `prefixes`: what these say that
    sequences share is read once for several of them, by a launch before, and summed up alone. They
    are those of `plan_prefixes` for the same tables, lengths and configuration, without a window.
    Launches on one device must not overlap, and the first must not be captured into a graph: they
    share counters that are zero between launches.
    """
    if not len(context_lens):
        return
    _check(q, kv_cache, block_tables, context_lens, out, sinks)
    assert soft_cap >= 0 and window >= 0
    if config is None:
        config = config_for(kv_cache)
    multiprocessors = num_multiprocessors(q.device)
    use_tma = _can_use_tma(kv_cache, config)
    shape = _shape(
        q.shape[1], kv_cache.shape[2:], use_tma, multiprocessors, soft_cap, window, config
    )
    max_blocks, num_parts = block_tables.shape[1], 1 if prefixes is None else 1 + LEVELS
    max_splits = _max_splits(shape, max_blocks, num_parts)
    num_seqs = len(context_lens)
    num_items = num_seqs * shape.num_kv_heads * max_splits
    grid = (min(multiprocessors * config.blocks_per_sm, num_items),)
    partials = torch.empty(
        (num_items if max_splits > 1 else 0, shape.group_size, shape.head_dim + STATS.value),
        dtype=torch.float32,
        device=q.device,
    )
    cache = _rows_descriptor(kv_cache, shape) if shape.use_tma else kv_cache
    sizes = (
        scale * 2 * LOG2_E / soft_cap if soft_cap else scale * LOG2_E,
        num_seqs,
        max_splits,
        *q.stride()[:2],
        kv_cache.stride(0) // shape.head_dim,
        block_tables.stride(0),
    )
    if prefixes is not None:
        assert not window and prefixes.seqs.shape == (LEVELS, num_seqs)
        shared_prefix_kernel[grid](
            q,
            cache,
            block_tables,
            prefixes.seqs,
            prefixes.counts,
            prefixes.ends,
            partials,
            *sizes,
            SHAPE=shape,
            BLOCK_R=_prefix_rows(kv_cache),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **launch_options(),
        )
    padded_rows = max(MIN_DOT_ROWS, next_power_of_2(shape.group_size))
    paged_decode_kernel[grid](
        q,
        cache,
        block_tables,
        context_lens,
        context_lens if sinks is None else sinks,
        context_lens if prefixes is None else prefixes.ends,
        out,
        partials,
        arrivals(q.device),
        *sizes,
        *out.stride()[:2],
        SHAPE=shape,
        HAS_SINKS=sinks is not None,
        HAS_PREFIXES=prefixes is not None,
        BLOCK_R=padded_rows,
        num_warps=config.num_warps if padded_rows < 64 else 8,  # four would spill
        num_stages=config.num_stages,
        **launch_options(),
    )


@cache
def _shape(
    num_heads: int,
    cache_shape: tuple[int, ...],  # num_kv_heads, block_size, head_dim
    use_tma: bool,
    multiprocessors: int,
    soft_cap: float,
    window: int,
    config: PagedAttentionConfig,
) -> DecodeShape:
    num_kv_heads, block_size, head_dim = cache_shape
    return DecodeShape(
        num_kv_heads=num_kv_heads,
        group_size=num_heads // num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        padded_dim=max(MIN_DOT_ROWS, next_power_of_2(head_dim)),
        soft_cap=soft_cap,
        window=window,
        split_weight=config.split_weight,
        least_splits=cdiv(multiprocessors, num_kv_heads) if config.fills_alone else 0,
        use_tma=use_tma,
        tile_tokens=config.tile_tokens,
    )


def plan_prefixes(
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], any layer
    block_tables: torch.Tensor,  # [num_seqs, max_blocks]
    context_lens: torch.Tensor,  # [num_seqs]
    group_size: int,
    config: PagedAttentionConfig | None = None,
) -> SharedPrefixes | None:
    """Return `prefixes` for paged_decode_attention of these sequences, over any layer of the pool.

    None for one sequence, and where the query heads of a KV head, `group_size` many, leave no room
    for another's.
    """
    if config is None:
        config = config_for(kv_cache)
    most_seqs = _prefix_rows(kv_cache) // group_size
    if len(context_lens) < 2 or most_seqs < 2:
        return None
    where = kv_cache.shape[3], config.tile_tokens
    return share_prefixes(block_tables, context_lens, *where, most_seqs)


def _prefix_rows(kv_cache: torch.Tensor) -> int:
    """Return how many query heads read a shared prefix together; more would spill registers."""
    is_wide = kv_cache.element_size() > 2 or kv_cache.shape[4] > 128
    return MIN_DOT_ROWS if is_wide else 2 * MIN_DOT_ROWS


def _check(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    """Assert what `paged_decode_attention` and its kernel expect of the tensors."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    record = block_size * head_dim
    assert q.dtype == kv_cache.dtype == out.dtype
    assert q.shape == out.shape and num_seqs == len(context_lens)
    assert num_heads % num_kv_heads == 0 and kv_cache.shape[4] == head_dim
    assert kv_cache.stride()[1:] == (num_kv_heads * record, record, head_dim, 1)
    assert kv_cache.stride(0) % head_dim == 0 and q.stride(2) == out.stride(2) == 1
    assert block_tables.stride(1) == 1 and context_lens.stride(0) == 1
    assert num_seqs * num_kv_heads <= MAX_ARRIVALS
    if sinks is not None:
        assert sinks.shape == (num_heads,) and sinks.is_contiguous()


def config_for(kv_cache: torch.Tensor) -> PagedAttentionConfig:
    """Return the configuration for one layer of a cache on this chip."""
    block_size, head_dim = kv_cache.shape[3:]
    element_bytes = kv_cache.element_size()
    return tuned_config(
        default_config(head_dim, element_bytes),
        "paged_attention",
        head_dim=head_dim,
        block_size=block_size,
        element_bytes=element_bytes,
    )


def _max_splits(shape: DecodeShape, max_blocks: int, num_parts: int) -> int:
    """Return the most splits of a sequence of up to so many blocks, cut in parts before."""
    max_tiles = cdiv(max_blocks * shape.block_size, shape.tile_tokens)
    # The sum of the parts' roots is largest where they are equal; rounded down, a share of a part's
    # tiles makes less than twice the splits.
    root = math.isqrt(int(num_parts * max(max_tiles - num_parts, 0) / shape.split_weight))
    return min(root + num_parts * (1 + 2 * shape.least_splits), max(max_tiles, 1))


def candidates(
    head_dim: int, group_size: int, element_bytes: int, block_size: int, arch: int
) -> Iterator[PagedAttentionConfig]:
    """Yield the configurations worth measuring for a shape on a chip."""
    padded_dim = next_power_of_2(head_dim)
    num_bytes = 2 * padded_dim * element_bytes  # of a token, key and value
    for tile_tokens, num_stages, blocks_per_sm, split_weight, use_tma in itertools.product(
        (64, 128), (2, 3, 4), (1, 2, 3), (1, 4), (False, True)
    ):
        tile_bytes = tile_tokens * num_bytes
        num_warps = _num_warps(tile_tokens, padded_dim)
        # cp.async into mma.sync's operands keeps one tile fewer than the stages.
        shared_bytes = (num_stages - (arch < 90)) * tile_bytes + 9 * 1024
        fits = (
            blocks_per_sm * shared_bytes <= MAX_SHARED_BYTES[80 if arch < 90 else 90]
            and blocks_per_sm * num_warps <= (12 if tile_bytes <= 16 * 1024 else 8)  # registers
            and tile_tokens * padded_dim <= 128 * 128
        )
        # Little's law: 4.3 TB/s at 0.8 us are 26 KB under way per multiprocessor, on average.
        enough = blocks_per_sm * (num_stages - 1) * tile_bytes >= 48 * 1024
        if fits and enough and (not use_tma or (arch >= 90 and block_size % tile_tokens == 0)):
            yield PagedAttentionConfig(
                tile_tokens, num_warps, num_stages, blocks_per_sm, split_weight, use_tma
            )


def _num_warps(tile_tokens: int, padded_dim: int) -> int:
    # Four spill what a larger tile keeps in registers.
    return 8 if tile_tokens * padded_dim >= 128 * 128 else 4


def _can_use_tma(kv_cache: torch.Tensor, config: PagedAttentionConfig) -> bool:
    block_size, head_dim = kv_cache.shape[3:]
    return (
        config.use_tma
        and (architecture() >= 90 or architecture() == INTERPRETED)
        and block_size % config.tile_tokens == 0
        and head_dim * kv_cache.element_size() % 16 == 0
        and kv_cache.storage_offset() * kv_cache.element_size() % 16 == 0
    )


def _rows_descriptor(kv_cache: torch.Tensor, shape: DecodeShape) -> Any:
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_rows = (num_blocks - 1) * (kv_cache.stride(0) // head_dim) + 2 * num_kv_heads * block_size
    assert num_rows < 2**31, "the copy engine counts rows in 32 bits"
    tile = [shape.tile_tokens, shape.padded_dim]
    return TensorDescriptor(kv_cache, [num_rows, head_dim], [head_dim, 1], tile)
