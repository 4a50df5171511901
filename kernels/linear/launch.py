"""Multiplication by a weight matrix on a GPU: numbers by cuBLAS or in one order of sums, codes."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F

from tandem.kernels.arrivals import MAX_ARRIVALS, arrivals
from tandem.kernels.dependent_launch import launch_options
from tandem.kernels.linear.codes import form_of, step_size, stored_parts, weight_bits
from tandem.kernels.linear.expand import expanded_parts
from tandem.kernels.linear.float8 import round_inputs
from tandem.kernels.linear.heads import qkv_kernel
from tandem.kernels.linear.products import ProductShape, linear_kernel
from tandem.kernels.reference.linear import Linear
from tandem.kernels.reference.quantized import INPUT_GROUP, Matrix, QuantizedMatrix, rounds_inputs
from tandem.kernels.sizes import cdiv
from tandem.kernels.tuned import INTERPRETED, architecture, tuned_config

Activation = Literal["", "silu", "gelu"]

MAX_SHARED_TOKENS = 128  # for which the splits of a tile are shared out among programs
TILES_TOGETHER = 16  # of tokens, where there are many
# For fewer, a matrix takes longer to expand than products in expanding tiles take beyond cuBLAS's.
LEAST_EXPANDED_TOKENS = 512
ENOUGH_PROGRAMS = 384  # three for each multiprocessor; the same on all chips, as sums depend on it
MAX_SPLITS = 8
LEAST_SPLIT_SIZE = 512  # inputs
PREFETCHED_LINES = 8  # of each row: two times what is on its way while a kernel runs


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """A program's tile of tokens by outputs, the inputs of one step, and the parts of all inputs.

    A row's bits depend on block_k and num_splits.
    """

    block_m: int
    block_n: int
    block_k: int
    num_splits: int
    num_warps: int
    num_stages: int


@cache
def default_config(
    in_size: int, num_columns: int, bits: int, element_bytes: int, is_paired: int
) -> LinearConfig:
    """Return the tiles for few tokens; those for many sum in the same order."""
    block_n = 32 if element_bytes == 4 or is_paired else 64
    wanted = ENOUGH_PROGRAMS // cdiv(num_columns, block_n)
    num_splits = max(1, min(wanted, MAX_SPLITS, in_size // LEAST_SPLIT_SIZE))
    if element_bytes == 4:
        return LinearConfig(16, block_n, 32, num_splits, 4, 2)
    # With fewer warps, partial sums and numbers of codes would spill.
    num_warps = 4 if is_paired and bits == 16 else 8
    return LinearConfig(64, block_n, 64, num_splits, num_warps, 3)


@cache
def large_config(default: LinearConfig, *, has_codes: bool) -> LinearConfig:
    """Return the tiles for many tokens, which load, and expand, a number for more products."""
    block_n = default.block_n if has_codes else 2 * default.block_n  # sums of codes would spill
    return replace(default, block_m=128, block_n=block_n, num_warps=8, num_stages=3)


@cache
def float8_config(default: LinearConfig, *, is_large: bool) -> LinearConfig:
    """Return the tiles of a product of float8 by float8; sums run in one order in all of them."""
    if not is_large:
        return replace(default, block_m=64, block_k=INPUT_GROUP)
    block_n = 128 if default.num_splits == 1 else 64  # sums of several splits would spill
    return LinearConfig(128, block_n, INPUT_GROUP, default.num_splits, 8, 3)


def candidates(in_size: int, num_columns: int, element_bytes: int) -> Iterator[LinearConfig]:
    """Yield the configurations worth measuring: a chip's worth of programs, or some of them."""
    if element_bytes == 4:
        yield from (LinearConfig(16, 32, 32, splits, 4, 2) for splits in (1, 2, 4))
        return
    for block_n, block_k, num_splits, num_warps, num_stages in itertools.product(
        (32, 64), (64, 128), (1, 2, 3, 4, 6, 8), (4, 8), (3, 4)
    ):
        programs = cdiv(num_columns, block_n) * num_splits
        if 96 <= programs <= 2 * ENOUGH_PROGRAMS and in_size >= num_splits * LEAST_SPLIT_SIZE // 2:
            yield LinearConfig(64, block_n, block_k, num_splits, num_warps, num_stages)


def pack_linear(weight: Matrix) -> Linear:
    """Return `x @ weight.T`; `weight` is [out, in], and read as it is.

    Numbers are cuBLAS's, and so are codes for many tokens, which are expanded in dtype of x before.
    """
    if isinstance(weight, torch.Tensor):
        return partial(F.linear, weight=weight)
    if rounds_inputs(weight):
        return pack_linear_in_order(weight)
    return partial(_multiply_expanded, weight=weight)


def pack_linear_in_order(weight: Matrix) -> Linear:
    """Return `x @ weight.T`, in which a row has the same bits in every batch.

    Codes are exact in the dtype of x, or x is rounded to float8; each group's sum, in float32, is
    multiplied by its scale.
    """
    return partial(multiply, weight=weight)


def _multiply_expanded(x: torch.Tensor, weight: QuantizedMatrix) -> torch.Tensor:
    if len(x) < LEAST_EXPANDED_TOKENS:
        return multiply(x, weight)
    out = torch.empty((len(x), weight.shape[0]), dtype=x.dtype, device=x.device)
    first = 0
    for part in expanded_parts(weight, x.dtype):
        torch.mm(x, part.T, out=out[:, first : first + len(part)])
        first += len(part)
    return out


def multiply_in_float32(x: torch.Tensor, weight: Matrix) -> torch.Tensor:
    """Return `x @ weight.T` without a rounding of the sums; numbers are cuBLAS's."""
    if not isinstance(weight, torch.Tensor):
        return multiply(x, weight, out_dtype=torch.float32)
    if x.device.type == "cuda" and x.dtype != torch.float32:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def pack_share(weight: Matrix, num_rows: int) -> Linear:
    """Return pack_linear_in_order of some rows of a matrix that has `num_rows`.

    A result has the bits that the product with the whole matrix gives it.
    """
    return partial(multiply, weight=weight, num_rows=num_rows)


def multiply(
    x: torch.Tensor,  # [num_tokens, in_size]
    weight: Matrix,  # [out_size, in_size]
    *,
    norm: torch.Tensor | None = None,  # [in_size]: x is normed by RMS, and multiplied by it
    eps: float = 0.0,
    bias: torch.Tensor | None = None,  # [out_size]
    activation: Activation = "",  # of the first half of the results, times the other half
    residual: torch.Tensor | None = None,  # to which the results are added in place
    out_dtype: torch.dtype | None = None,  # None: that of x
    num_rows: int | None = None,  # of the matrix of which `weight` is a share; None: all of it
    config: LinearConfig | None = None,
) -> torch.Tensor:
    """Return `x @ weight.T`, or `residual`. A row has the same bits in every batch."""
    num_tokens, all_rows = len(x), num_rows or weight.shape[0]
    out_size = weight.shape[0] // 2 if activation else weight.shape[0]
    out = residual
    if out is None:
        dtype = out_dtype or x.dtype
        out = torch.empty((num_tokens, out_size), dtype=dtype, device=x.device)
    else:
        assert out.dtype == x.dtype and out_dtype is None
    assert out.shape == (num_tokens, out_size) and out.is_contiguous()
    if num_tokens == 0:
        return out
    pair_size = out_size if activation else 0
    all_columns = all_rows // 2 if activation else all_rows
    launch = _launch_of(
        x, weight, norm, bias, out_size, pair_size, config=config, all_columns=all_columns
    )
    linear_kernel[launch.grid](
        *launch.tensors,
        out,
        num_tokens,
        launch.tensors[0].stride(0),
        eps,
        out_size=out_size,
        ACTIVATION=activation,
        ADDS=residual is not None,
        **launch.options,
    )
    return out


def multiply_qkv(
    x: torch.Tensor,  # [num_tokens, in_size]
    weight: Matrix,  # [(num_heads + 2 * num_kv_heads) * head_dim, in_size]
    qk_norm: torch.Tensor | None,  # [num_heads + num_kv_heads, head_dim], None: no norm
    rope_table: torch.Tensor,  # [max_len, 2, head_dim]: cosine, sine negated in its first half
    positions: torch.Tensor,  # [num_tokens] each below max_len, padding's too
    slot_mapping: torch.Tensor,  # [num_tokens] |-> block_id * block_size + offset, < 0: nowhere
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer
    eps: float,  # of both norms
    *,
    norm: torch.Tensor | None = None,  # [in_size]
    bias: torch.Tensor | None = None,  # of the weight's rows
) -> torch.Tensor:
    """Return rotated queries [num_tokens, num_heads, head_dim]; store keys and values in the cache.

    It is `multiply` and `store_qkv` in one launch, where `has_fused_products`.
    """
    num_tokens, (_, _, num_kv_heads, block_size, head_dim) = len(x), kv_cache.shape
    num_all_heads = weight.shape[0] // head_dim
    num_heads = num_all_heads - 2 * num_kv_heads
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return q
    record = block_size * head_dim
    assert has_fused_products(head_dim) and kv_cache.dtype == x.dtype
    assert kv_cache.stride()[1:] == (num_kv_heads * record, record, head_dim, 1)
    assert rope_table.shape[1:] == (2, head_dim) and rope_table.is_contiguous()
    assert positions.shape == slot_mapping.shape == (num_tokens,)
    assert positions.stride(0) == slot_mapping.stride(0) == 1
    if qk_norm is not None:
        assert qk_norm.shape == (num_heads + num_kv_heads, head_dim) and qk_norm.is_contiguous()
    half = head_dim // 2
    unit = 1 if qk_norm is None else half  # of a norm, a tile holds whole heads
    launch = _launch_of(x, weight, norm, bias, num_all_heads * half, half, unit=unit)
    qkv_kernel[launch.grid](
        *launch.tensors,
        x if qk_norm is None else qk_norm,
        rope_table,
        positions,
        slot_mapping,
        kv_cache,
        q,
        num_tokens,
        launch.tensors[0].stride(0),
        kv_cache.stride(0),
        eps,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        HAS_QK_NORM=qk_norm is not None,
        **launch.options,
    )
    return q


def has_fused_products(head_dim: int) -> bool:
    """Return True where `multiply_qkv` takes such heads, of which a tile holds whole ones.

    Before sm_90 its builds spill.
    """
    return head_dim in (16, 32, 64, 128) and not INTERPRETED < architecture() < 90


@dataclass(frozen=True, slots=True)
class _Launch:
    """The part of a launch that all products have in common."""

    grid: tuple[int, int, int]
    tensors: tuple[torch.Tensor, ...]
    options: dict[str, Any]


def _launch_of(
    x: torch.Tensor,
    weight: Matrix,
    norm: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_columns: int,
    pair_size: int,  # of ProductShape
    *,
    unit: int = 0,  # of heads, whose sums would spill in large tiles: the least columns of a tile
    config: LinearConfig | None = None,
    all_columns: int | None = None,  # of the matrix by which the order of sums is chosen
) -> _Launch:
    num_tokens, in_size = x.shape
    is_shared = num_tokens <= MAX_SHARED_TOKENS
    assert weight.shape[1] == in_size and x.stride(1) == 1
    assert norm is None or (norm.shape == (in_size,) and norm.stride(0) == 1)
    assert bias is None or (bias.shape == weight.shape[:1] and bias.stride(0) == 1)
    shape = {
        "in_size": in_size,
        "num_columns": all_columns or num_columns,
        "bits": weight_bits(weight),
    }
    shape |= {"element_bytes": x.element_size(), "is_paired": int(pair_size > 0)}
    matrix, scales, zeros = stored_parts(weight)
    token_scales, form = x, form_of(weight)
    if rounds_inputs(weight):
        is_large = not (is_shared or pair_size or norm is not None)
        config = float8_config(default_config(**shape), is_large=is_large)
        matrix, form = matrix.view(torch.float8_e4m3fn), replace(form, factor=1.0)
        if is_large:
            x, token_scales = round_inputs(x)
    elif config is None:
        config = tuned_config(default_config(**shape), "linear", **shape)
        if not is_shared and not unit and x.element_size() == 2:
            config = large_config(config, has_codes=not isinstance(weight, torch.Tensor))
    block_n = max(config.block_n, unit)
    columns, tokens = cdiv(num_columns, block_n), cdiv(num_tokens, config.block_m)
    is_shared = is_shared and config.num_splits > 1
    records = 0
    if is_shared:
        assert columns * tokens <= MAX_ARRIVALS
        records = columns * tokens * config.num_splits * config.block_m * (2 * block_n + 1)
    launched = launch_options()
    product = ProductShape(
        in_size=in_size,
        pair_size=pair_size,
        form=form,
        has_norm=norm is not None,
        has_bias=bias is not None,
        num_splits=config.num_splits,
        is_shared=is_shared,
        tiles_together=1 if num_tokens <= MAX_SHARED_TOKENS else TILES_TOGETHER,
        # What is asked for before the previous kernel has ended.
        prefetched_lines=PREFETCHED_LINES if launched else 0,
        block_m=config.block_m,
        block_n=block_n,
        block_k=step_size(weight, config.block_k),
    )
    options = {
        "SHAPE": product,
        "num_warps": min(8, config.num_warps * block_n // config.block_n),
        "num_stages": config.num_stages,
        **launched,
    }
    tensors = (
        x,
        token_scales,
        x if norm is None else norm,
        matrix,
        scales,
        zeros,
        x if bias is None else bias,
        torch.empty(records, dtype=torch.float32, device=x.device),
        arrivals(x.device),
    )
    return _Launch((columns, tokens, config.num_splits if is_shared else 1), tensors, options)
