"""The kernels in C beside this file, with the signatures of tandem.kernels.reference."""

import ctypes
from collections.abc import Callable
from functools import lru_cache

import torch

from tandem.kernels.cpu.build import load_library
from tandem.kernels.sampling.rows import TokenMasks

PANEL = 64  # rows of a weight matrix that stand side by side, as in linear.c
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # enum dtype
POINTER, LONG, FLOAT, INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int


def fields(*kinds: tuple[type, str]) -> list[tuple[str, type]]:
    """Return the fields of a structure, from their types and names apart by spaces."""
    return [(name, kind) for kind, names in kinds for name in names.split()]


class _Storing(ctypes.Structure):
    """struct storing"""

    _fields_ = fields(
        (POINTER, "qkv qk_norm rope_table positions slots kv_cache q_out"),
        (LONG, "qkv_stride q_stride block_stride to_values"),
        (LONG, "num_heads num_kv_heads head_dim block_size"),
        (FLOAT, "eps"),
        (INT, "qkv_dtype norm_dtype table_dtype cache_dtype"),
    )


class _Attention(ctypes.Structure):
    """struct attention"""

    _fields_ = fields(
        (POINTER, "q kv_cache out block_tables cu_seqlens context_lens sinks"),
        (LONG, "q_stride out_stride table_stride block_stride to_values"),
        (LONG, "num_heads num_kv_heads head_dim block_size window"),
        (FLOAT, "scale soft_cap"),
        (INT, "q_dtype cache_dtype out_dtype"),
    )


def function(name: str, *types: type) -> Callable[..., int]:
    """Return a function in C of arguments of these types."""
    found = load_library()[name]
    found.argtypes = types
    return found


_rms_norm = function("rms_norm", *[POINTER] * 4, *[LONG] * 5, FLOAT, *[INT] * 5)
_silu_mul = function("silu_mul", *[POINTER] * 2, *[LONG] * 4, *[INT] * 2)
_gelu_mul = function("gelu_mul", *[POINTER] * 2, *[LONG] * 4, *[INT] * 2)
_store_qkv = function("store_qkv", POINTER, LONG, INT)
_mask_logits = function("mask_logits", *[POINTER] * 3, *[LONG] * 4, INT)
_attend = function("attend", POINTER, LONG, INT)
_linear = function("linear", *[POINTER] * 3, *[LONG] * 5, *[INT] * 2)
multiplies_bfloat16 = function("multiplies_bfloat16")


def rms_norm(
    x: torch.Tensor,  # [num_tokens, hidden_size]
    weight: torch.Tensor,  # [hidden_size]
    eps: float,
    out: torch.Tensor,  # [num_tokens, hidden_size], may be x
) -> None:
    """Compute out = x / rms(x) * weight, in float32 and rounded once."""
    _norm(x, None, weight, eps, out)


def add_rms_norm(
    x: torch.Tensor,  # [num_tokens, hidden_size]
    residual: torch.Tensor,  # [num_tokens, hidden_size]
    weight: torch.Tensor,  # [hidden_size]
    eps: float,
    out: torch.Tensor,  # [num_tokens, hidden_size], may be x
) -> None:
    """Add x to residual in place, rounded to its dtype; out is the norm of that rounded sum."""
    _norm(x, residual, weight, eps, out)


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> None:
    _rms_norm(
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        *x.shape,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        eps,
        DTYPES[x.dtype],
        0 if residual is None else DTYPES[residual.dtype],
        DTYPES[weight.dtype],
        DTYPES[out.dtype],
        torch.get_num_threads(),
    )


def silu_mul(
    gate_up: torch.Tensor,  # [num_tokens, 2 * intermediate_size], gates first
    out: torch.Tensor,  # [num_tokens, intermediate_size], no part of gate_up
) -> None:
    """Compute out = silu(gate) * up; silu(gate) is rounded to its dtype before the product."""
    _activate_mul(_silu_mul, gate_up, out)


def gelu_mul(
    gate_up: torch.Tensor,  # [num_tokens, 2 * intermediate_size], gates first
    out: torch.Tensor,  # [num_tokens, intermediate_size], no part of gate_up
) -> None:
    """Compute out = gelu(gate) * up with GELU by tanh, rounded to its dtype before the product."""
    _activate_mul(_gelu_mul, gate_up, out)


def _activate_mul(function: Callable[..., int], gate_up: torch.Tensor, out: torch.Tensor) -> None:
    function(
        gate_up.data_ptr(),
        out.data_ptr(),
        *out.shape,
        gate_up.stride(0),
        out.stride(0),
        DTYPES[gate_up.dtype],
        torch.get_num_threads(),
    )


def store_qkv(
    qkv: torch.Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    qk_norm: torch.Tensor | None,  # [num_heads + num_kv_heads, head_dim], None: no norm
    rope_table: torch.Tensor,  # [max_len, 2, head_dim]: cosine, sine negated in its first half
    positions: torch.Tensor,  # [num_tokens]
    slot_mapping: torch.Tensor,  # [num_tokens] |-> block_id * block_size + offset, < 0: nowhere
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer
    eps: float,
    q_out: torch.Tensor,  # [num_tokens, num_heads, head_dim], may be qkv's own queries
) -> None:
    """Norm and rotate queries into q_out and keys into the cache; store values unchanged."""
    num_tokens, num_rows, head_dim = qkv.shape
    num_kv_heads, block_size = _pool_shape(kv_cache)
    positions, slot_mapping = _indices(positions), _indices(slot_mapping)
    call = _Storing(
        qkv.data_ptr(),
        None if qk_norm is None else qk_norm.data_ptr(),
        rope_table.data_ptr(),
        positions.data_ptr(),
        slot_mapping.data_ptr(),
        kv_cache.data_ptr(),
        q_out.data_ptr(),
        qkv.stride(0),
        q_out.stride(0),
        *kv_cache.stride()[:2],
        num_rows - 2 * num_kv_heads,
        num_kv_heads,
        head_dim,
        block_size,
        eps,
        DTYPES[qkv.dtype],
        DTYPES[qkv.dtype if qk_norm is None else qk_norm.dtype],
        DTYPES[rope_table.dtype],
        DTYPES[kv_cache.dtype],
    )
    _store_qkv(ctypes.addressof(call), num_tokens, torch.get_num_threads())


def mask_logits(
    logits: torch.Tensor,  # [num_rows, vocab_size], changed in place
    masks: TokenMasks,
) -> None:
    """Put -inf where a masked row may not draw a token."""
    num_masked, num_words = masks.bits.shape
    assert masks.bits.dtype == torch.int32 and masks.bits.is_contiguous()
    assert 32 * num_words >= logits.shape[1] > 32 * (num_words - 1) and logits.stride(1) == 1
    _mask_logits(
        logits.data_ptr(),
        _indices(masks.rows).data_ptr(),
        masks.bits.data_ptr(),
        num_masked,
        num_words,
        logits.shape[1],
        logits.stride(0),
        DTYPES[logits.dtype],
    )


def linear(
    x: torch.Tensor,  # [num_tokens, in]
    panels: torch.Tensor,  # [ceil(out / PANEL), in, PANEL], as pack_panels makes it
    out_size: int,
) -> torch.Tensor:
    """Return x times the matrix, [num_tokens, out_size]; float32, or bfloat16 if supported.

    Each sum runs in float32 from the first product to the last, whatever else is computed.
    """
    num_tokens, in_size = x.shape
    assert x.dtype == panels.dtype and x.stride(1) == 1
    assert panels.numel() == (out_size + -out_size % PANEL) * in_size
    assert x.dtype == torch.float32 or x.stride(0) % 2 == 0
    out = torch.empty(num_tokens, out_size, dtype=x.dtype)
    _linear(
        x.data_ptr(),
        panels.data_ptr(),
        out.data_ptr(),
        num_tokens,
        in_size,
        out_size,
        x.stride(0),
        out_size,
        DTYPES[x.dtype],
        torch.get_num_threads(),
    )
    return out


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
) -> None:
    """Let the last token of each sequence attend over its context."""
    cu_seqlens = _one_each(q.shape[0])
    _attention(
        q, kv_cache, block_tables, cu_seqlens, context_lens, scale, out, soft_cap, window, sinks
    )


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
) -> None:
    """Let a run of query tokens per sequence attend causally over the cache, itself included.

    The last query of a sequence sits at position context_len - 1. The keys and values of the
    queries must be stored already. With a window a query at position p sees (p - window, p];
    soft_cap c turns a score s, after the scale, into c * tanh(s / c). Sums are float32 whatever the
    dtypes; of bfloat16 queries over a bfloat16 pool weights are rounded to it, where the processor
    multiplies it.
    """
    _attention(
        q, kv_cache, block_tables, cu_seqlens_q, context_lens, scale, out, soft_cap, window, sinks
    )


def _attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    soft_cap: float,
    window: int,
    sinks: torch.Tensor | None,
) -> None:
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.shape == (q.shape[1],))
    num_kv_heads, block_size = _pool_shape(kv_cache)
    block_tables, context_lens = _indices(block_tables), _indices(context_lens)
    cu_seqlens = _indices(cu_seqlens)
    call = _Attention(
        q.data_ptr(),
        kv_cache.data_ptr(),
        out.data_ptr(),
        block_tables.data_ptr(),
        cu_seqlens.data_ptr(),
        context_lens.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        q.stride(0),
        out.stride(0),
        block_tables.stride(0),
        *kv_cache.stride()[:2],
        q.shape[1],
        num_kv_heads,
        q.shape[2],
        block_size,
        window,
        scale,
        soft_cap,
        DTYPES[q.dtype],
        DTYPES[kv_cache.dtype],
        DTYPES[out.dtype],
    )
    if _attend(ctypes.addressof(call), context_lens.shape[0], torch.get_num_threads()):
        raise MemoryError("no memory for attention")


@lru_cache  # every layer of every step needs the same few
def _one_each(num_seqs: int) -> torch.Tensor:
    """Return [num_seqs + 1], the start of each sequence's only query, and the end of the last."""
    return torch.arange(num_seqs + 1)


def _pool_shape(kv_cache: torch.Tensor) -> tuple[int, int]:
    """Return KV heads and block size of one layer of a pool, or of some heads of it."""
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    assert kv_cache.stride()[2:] == (block_size * head_dim, head_dim, 1)
    return num_kv_heads, block_size


def _indices(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype is torch.int64 else values.long()
