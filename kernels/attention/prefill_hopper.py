"""Prefill attention on a Hopper GPU: the launcher of the kernel written for sm_90.

`prefill_attention` launches it for `offered` shapes whose configuration is `warp_specialized`: by
default those of sm_90, where it was measured at 1.25 to 1.3 times the other kernel's rate.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tandem.kernels.arrivals import arrivals
from tandem.kernels.attention.prefill_hopper_kernel import (
    ROWS,
    SWIZZLE,
    TILE_ROWS,
    TILE_TOKENS,
    prefill_hopper_kernel,
)
from tandem.kernels.tuned import num_multiprocessors, tuned_config


@dataclass(frozen=True, slots=True)
class PrefillHopperConfig:
    """Stages of the K and V rings; with `take_turns` consumers alternate on the tensor cores."""

    num_stages: int = 2
    take_turns: bool = True
    idle_multiprocessors: int = 0


LOG2_E = math.log2(math.e)
DEFAULT = PrefillHopperConfig()
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def candidates(head_dim: int) -> Iterator[PrefillHopperConfig]:
    """Yield the configurations worth measuring."""
    for stages, turns, idle in product((2, 3) if head_dim == 64 else (2,), (True, False), (0, 1)):
        yield PrefillHopperConfig(num_stages=stages, take_turns=turns, idle_multiprocessors=idle)


def offered(head_dim: int, block_size: int, dtype: torch.dtype) -> bool:
    """Return True when `prefill_attention_hopper` takes such a pool."""
    whole_blocks = TILE_TOKENS.value % block_size == 0 or block_size % TILE_TOKENS.value == 0
    sixteen_bit = dtype in (torch.float16, torch.bfloat16)
    return head_dim in (64, 128) and block_size >= 16 and whole_blocks and sixteen_bit


def prefill_attention_hopper(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim], sequences one after another
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer
    block_tables: torch.Tensor,  # [num_seqs, max_blocks] (seq, ordinal) |-> block_id
    cu_seqlens_q: torch.Tensor,  # [num_seqs + 1] seq |-> its first token in q
    context_lens: torch.Tensor,  # [num_seqs] positions attended by a sequence's last query
    max_query_len: int,
    scale: float,
    out: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    *,
    config: PrefillHopperConfig | None = None,
) -> None:
    """Let a run of query tokens per sequence attend causally over the cache, itself included.

    As `prefill_attention`, for `offered` shapes and scale > 0. q's rows and the pool must lie at
    multiples of 16 bytes. Launches on a device share a counter (`arrivals`): they must not overlap.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, _, num_kv_heads, block_size, _ = kv_cache.shape
    num_seqs = context_lens.shape[0]
    if num_seqs == 0 or max_query_len == 0:
        return
    block_stride, kv_stride, *record_strides = kv_cache.stride()
    q_token_stride, q_head_stride, q_stride = q.stride()
    token_stride, head_stride, stride = out.stride()
    table_stride, block_id_stride = block_tables.stride()
    assert offered(head_dim, block_size, q.dtype) and scale > 0
    assert q.dtype == kv_cache.dtype == out.dtype
    assert num_heads % num_kv_heads == 0 and kv_cache.shape[4] == head_dim
    assert record_strides == [block_size * head_dim, head_dim, 1] and q_stride == stride == 1
    assert block_stride % head_dim == kv_stride % head_dim == 0
    assert block_id_stride == cu_seqlens_q.stride(0) == context_lens.stride(0) == 1
    if config is None:
        config = tuned_config(
            DEFAULT, "prefill_attention_hopper", head_dim=head_dim, block_size=block_size
        )
    # The pool as a column of head_dim-wide records, q as a matrix of all heads side by side.
    block_records, kv_records = block_stride // head_dim, kv_stride // head_dim
    num_records = (num_blocks - 1) * block_records + kv_records + num_kv_heads * block_size
    q_width = (num_heads - 1) * q_head_stride + head_dim
    num_tiles = num_tokens // TILE_ROWS.value + num_seqs
    num_items = num_tiles * num_heads
    num_programs = num_multiprocessors(q.device) - config.idle_multiprocessors
    prefill_hopper_kernel[(min(num_programs, num_items),)](
        _boxes(q, [num_tokens, q_width], q_token_stride, ROWS.value),
        _boxes(kv_cache, [num_records, head_dim], head_dim, min(block_size, TILE_TOKENS.value)),
        arrivals(q.device),
        (block_tables, cu_seqlens_q, context_lens),
        table_stride,
        num_seqs,
        num_tiles - 1,
        num_items,
        num_records,
        (q_head_stride, block_records, kv_records),
        (out, token_stride, head_stride, scale * LOG2_E),
        num_heads=num_heads,
        group_size=num_heads // num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        STAGES=config.num_stages,
        TURNS=config.take_turns,
        num_warps=4,
    )


def _boxes(tensor: torch.Tensor, shape: list[int], row_stride: int, rows: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, shape, [row_stride, 1], [rows, SWIZZLE.value], _LAYOUT)
