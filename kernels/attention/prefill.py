"""Prefill attention: runs of query tokens over their paged context, causal, of any lengths."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tandem.kernels.attention.prefill_kernel import prefill_kernel
from tandem.kernels.tuned import INTERPRETED, architecture, num_multiprocessors, tuned_config

MIN_DOT_ROWS = 16  # tl.dot takes no tile with fewer rows
FIRST_TMA_ARCH = 90
HOPPER_ARCH = 90
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # a block's, CUDA guide 16.2
MAX_REGISTERS = 255  # a thread's


@dataclass(frozen=True, slots=True)
class PrefillAttentionConfig:
    """The tiles of the work: BLOCK_M rows, BLOCK_N context positions a step."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int  # buffers of keys and of values: a load has num_stages - 2 steps to arrive
    use_tma: bool  # where BLOCK_N positions lie in one block; else every thread loads rows
    persistent: bool  # a program per multiprocessor takes tiles in turn; else a program per tile
    warp_specialized: bool = False  # launch prefill_attention_hopper where it takes the shape


# Tiles that the copy engine loads from blocks of 64, in place of the threads that load tiles of 128
# by default: tuning and the bench compare the two.
BLOCKS_OF_64 = PrefillAttentionConfig(128, 64, 8, 4, use_tma=True, persistent=True)


def prefill_attention(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim], sequences one after another
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer
    block_tables: torch.Tensor,  # [num_seqs, max_blocks] (seq, ordinal) |-> block_id
    cu_seqlens_q: torch.Tensor,  # [num_seqs + 1] seq |-> its first token in q
    context_lens: torch.Tensor,  # [num_seqs] positions attended by a sequence's last query
    max_query_len: int,
    scale: float,
    out: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    *,
    soft_cap: float = 0.0,
    window: int = 0,
    sinks: torch.Tensor | None = None,  # [num_heads], float32
    config: PrefillAttentionConfig | None = None,
) -> None:
    """Let a run of query tokens per sequence attend causally over the cache, itself included.

    The last query of a sequence sits at position context_len - 1. The keys and values of the
    queries must be stored already; slots past a sequence's context are never used. With a window a
    query at position p sees (p - window, p]; soft_cap c turns a score s, after the scale, into
    c * tanh(s / c). A sink is one more score of a head, of no position.
    """
    num_seqs = context_lens.shape[0]
    if num_seqs == 0 or max_query_len == 0:
        return
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    if config is None:
        config = config_for(kv_cache)
    if config.warp_specialized and not soft_cap and not window and sinks is None:
        # Imported here: Gluon is experimental in Triton, and only this chip's kernel needs it.
        from tandem.kernels.attention.prefill_hopper import offered, prefill_attention_hopper

        if offered(head_dim, block_size, q.dtype):
            prefill_attention_hopper(
                q, kv_cache, block_tables, cu_seqlens_q, context_lens, max_query_len, scale, out
            )
            return
    _check(q, kv_cache, block_tables, cu_seqlens_q, context_lens, out, sinks)
    assert scale > 0
    source, use_tma = _source(kv_cache, config)
    group_size = num_heads // num_kv_heads
    # A sequence's tiles begin where its rows do, and one further for every sequence before it.
    num_tiles = num_tokens * group_size // config.BLOCK_M + num_seqs
    num_programs = num_tiles * num_kv_heads
    if config.persistent:
        num_programs = min(num_programs, num_multiprocessors(q.device))
    prefill_kernel[(num_programs,)](
        q,
        source,
        block_tables,
        cu_seqlens_q,
        context_lens,
        context_lens if sinks is None else sinks,
        out,
        scale,
        num_seqs,
        num_tiles,
        *q.stride()[:2],
        kv_cache.stride(0) // head_dim,
        block_tables.stride(0),
        *out.stride()[:2],
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        block_size=block_size,
        head_dim=head_dim,
        soft_cap=soft_cap,
        window=window,
        HAS_SINKS=sinks is not None,
        BLOCK_M=config.BLOCK_M,
        BLOCK_N=config.BLOCK_N,
        BLOCK_D=_padded(head_dim),
        STAGES=config.num_stages,
        USE_TMA=use_tma,
        PERSISTENT=config.persistent,
        num_warps=config.num_warps,
    )


def _check(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    """Assert what `prefill_attention` and its kernel expect of the tensors."""
    _, num_heads, head_dim = q.shape
    assert num_heads % kv_cache.shape[2] == 0 and kv_cache.shape[4] == head_dim
    assert q.dtype == kv_cache.dtype == out.dtype and q.stride(2) == out.stride(2) == 1
    assert sinks is None or (sinks.shape == (num_heads,) and sinks.is_contiguous())
    assert block_tables.stride(1) == cu_seqlens_q.stride(0) == context_lens.stride(0) == 1


def config_for(kv_cache: torch.Tensor) -> PrefillAttentionConfig:
    """Return the configuration for one layer of a cache on this chip."""
    block_size, head_dim = kv_cache.shape[3:]
    element_bytes = kv_cache.element_size()
    shape = {"head_dim": head_dim, "element_bytes": element_bytes, "block_size": block_size}
    return tuned_config(default_config(**shape), "prefill_attention", **shape)


def default_config(head_dim: int, element_bytes: int, block_size: int) -> PrefillAttentionConfig:
    """Return the configuration for shapes that are not in the table of tuned ones."""
    return _default_config(architecture(), head_dim, element_bytes, block_size)


@cache
def _default_config(
    arch: int, head_dim: int, element_bytes: int, block_size: int
) -> PrefillAttentionConfig:
    if element_bytes == 4:  # no tensor cores
        return PrefillAttentionConfig(16, 16, 4, 2, use_tma=False, persistent=False)
    if INTERPRETED < arch < FIRST_TMA_ARCH:
        rows, stages = (128, 4) if head_dim <= 128 else (64, 3)
        return PrefillAttentionConfig(rows, 32, 8, stages, use_tma=False, persistent=False)
    if head_dim > 128:
        return PrefillAttentionConfig(128, 32, 8, 4, use_tma=block_size % 32 == 0, persistent=True)
    use_tma = block_size % 128 == 0
    tokens = 128 if use_tma or arch < 100 else 64  # Blackwell's builds take more shared memory
    is_hopper = arch == HOPPER_ARCH and block_size >= 64  # blocks of 16: not measured
    return PrefillAttentionConfig(
        128, tokens, 8, 3, use_tma=use_tma, persistent=True, warp_specialized=is_hopper
    )


def candidates(
    head_dim: int, element_bytes: int, block_size: int, arch: int
) -> Iterator[PrefillAttentionConfig]:
    """Yield the configurations worth measuring on `arch`: those that fit a multiprocessor."""
    if element_bytes == 4:
        yield PrefillAttentionConfig(16, 16, 4, 2, use_tma=False, persistent=False)
        return
    block_d = _padded(head_dim)
    has_tma = arch >= FIRST_TMA_ARCH
    steps = (32,) if block_d > 128 else (64, 128) if has_tma else (32, 64)
    tiles = ((64, 4), (128, 8)) if has_tma else ((64, 4), (64, 8), (128, 8))
    may_use_tma = (False, True) if has_tma else (False,)
    for (rows, warps), tokens, stages, use_tma, persistent in product(
        tiles, steps, (2, 3, 4, 5), may_use_tma, (False, True)
    ):
        # Accumulators, scores, and weights in both precisions; then addresses and the like, and
        # before Hopper the keys that are being multiplied.
        registers = (rows * block_d + 2 * rows * tokens) // (32 * warps) + (56 if has_tma else 128)
        slack = 2560 if arch < 100 else 6656
        shared = (rows + 2 * stages * tokens) * block_d * element_bytes + slack
        fits = registers <= MAX_REGISTERS and shared <= SHARED_BYTES[arch]
        is_sound = (stages > 2 or block_d > 128) and not (use_tma and block_size % tokens)
        # ptxas serialises the wgmmas of the widest heads, but for the persistent build.
        takes_turns = persistent == (rows == 128) or (rows == 128 and block_d <= 128)
        if fits and is_sound and takes_turns:
            yield PrefillAttentionConfig(rows, tokens, warps, stages, use_tma, persistent)


def _padded(head_dim: int) -> int:
    return max(MIN_DOT_ROWS, 1 << (head_dim - 1).bit_length())


def _source(kv_cache: torch.Tensor, config: PrefillAttentionConfig) -> tuple[Any, bool]:
    """Return the rows of the cache, or a descriptor of them where the copy engine loads tiles."""
    rows = _cache_rows(kv_cache)
    block_size, head_dim = kv_cache.shape[3:]
    if not (config.use_tma and _tma_loads(rows, block_size, config.BLOCK_N)):
        return rows, False
    box = [config.BLOCK_N, _padded(head_dim)]
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), box), True


def _cache_rows(kv_cache: torch.Tensor) -> torch.Tensor:
    """Return [num_rows, head_dim], one row per token of a record, over the whole view."""
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    block_stride, record = kv_cache.stride(0), block_size * head_dim
    assert kv_cache.stride()[1:] == (num_kv_heads * record, record, head_dim, 1)
    assert block_stride % head_dim == 0
    num_rows = ((num_blocks - 1) * block_stride + 2 * num_kv_heads * record) // head_dim
    assert num_rows < 2**31
    return kv_cache.as_strided((num_rows, head_dim), (head_dim, 1))


def _tma_loads(rows: torch.Tensor, block_size: int, tile_tokens: int) -> bool:
    """Return True when the copy engine can load a tile: it lies in one block and is aligned."""
    aligned = rows.stride(0) * rows.element_size() % 16 == 0
    if rows.device.type != "meta":
        aligned = aligned and rows.data_ptr() % 16 == 0
    has_engine = architecture() == INTERPRETED or architecture() >= FIRST_TMA_ARCH
    return has_engine and aligned and block_size % tile_tokens == 0
