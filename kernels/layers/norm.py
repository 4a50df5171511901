"""RMSNorm over the hidden size, alone or after an addition to the residual stream."""

# In a kernel, a tuple grows and a name changes its type.
# mypy: disable-error-code="assignment,var-annotated"

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from tandem.kernels.dependent_launch import launch_options, wait_for_predecessor
from tandem.kernels.sizes import cdiv, next_power_of_2
from tandem.kernels.tuned import VECTOR_BYTES, WARP, tuned_config


@dataclass(frozen=True, slots=True)
class NormConfig:
    """A program's tile. A row is `ceil(hidden_size / block_width)` pieces, all in registers."""

    block_rows: int
    block_width: int
    num_warps: int


def rms_norm(
    x: torch.Tensor,  # [num_tokens, hidden_size]
    weight: torch.Tensor,  # [hidden_size]
    eps: float,
    out: torch.Tensor,  # [num_tokens, hidden_size], may be x
    *,
    config: NormConfig | None = None,
) -> None:
    """Compute out = x / rms(x) * weight, in float32 and rounded once."""
    _launch(x, None, weight, eps, out, config)


def add_rms_norm(
    x: torch.Tensor,  # [num_tokens, hidden_size]
    residual: torch.Tensor,  # [num_tokens, hidden_size]
    weight: torch.Tensor,  # [hidden_size]
    eps: float,
    out: torch.Tensor,  # [num_tokens, hidden_size], may be x
    *,
    config: NormConfig | None = None,
) -> None:
    """Add x to residual in place, rounded to its dtype; out is the norm of that rounded sum."""
    assert residual.shape == x.shape and residual.dtype == x.dtype and residual.stride(1) == 1
    _launch(x, residual, weight, eps, out, config)


@cache
def default_config(hidden_size: int, element_bytes: int) -> NormConfig:
    """Return two 16-byte vectors of a row per thread, and as many short rows as fill four warps.

    Independent of the number of tokens, so that sums run in one order in every batch.
    """
    piece = WARP * VECTOR_BYTES // element_bytes  # of one warp
    num_warps = 1
    while num_warps < 8 and 2 * piece * num_warps < hidden_size:
        num_warps *= 2
    block_width = min(piece * num_warps, next_power_of_2(hidden_size))
    if num_warps >= 4:
        return NormConfig(1, block_width, num_warps)
    return NormConfig(4 // num_warps * (piece * num_warps // block_width), block_width, 4)


def candidates(hidden_size: int, element_bytes: int) -> Iterator[NormConfig]:
    """Yield the configurations worth measuring: one to eight vectors per thread and rows."""
    piece = WARP * VECTOR_BYTES // element_bytes
    for num_warps in (1, 2, 4, 8, 16):
        for block_rows in (1, 2, 4, 8):
            if block_rows > num_warps:
                continue
            block_width = piece * num_warps // block_rows
            num_pieces = cdiv(hidden_size, block_width)
            if block_width < 2 * hidden_size and num_pieces <= 8:
                yield NormConfig(block_rows, block_width, num_warps)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    config: NormConfig | None,
) -> None:
    num_tokens, hidden_size = x.shape
    if num_tokens == 0:
        return
    assert out.shape == x.shape and out.dtype == x.dtype and weight.shape == (hidden_size,)
    (x_stride, stride), (out_stride, written_stride) = x.stride(), out.stride()
    assert stride == written_stride == weight.stride(0) == 1
    if config is None:
        shape = {"hidden_size": hidden_size, "element_bytes": x.element_size()}
        config = tuned_config(default_config(**shape), "rms_norm", **shape)
    _rms_norm_kernel[(cdiv(num_tokens, config.block_rows),)](
        x,
        x if residual is None else residual,
        weight,
        out,
        num_tokens,
        x_stride,
        x_stride if residual is None else residual.stride(0),
        out_stride,
        eps,
        hidden_size=hidden_size,
        HAS_RESIDUAL=residual is not None,
        NUM_PIECES=cdiv(hidden_size, config.block_width),
        BLOCK_ROWS=config.block_rows,
        BLOCK_WIDTH=config.block_width,
        num_warps=config.num_warps,
        **launch_options(),
    )


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x,  # [num_tokens, hidden_size]
    residual,  # [num_tokens, hidden_size]
    weight,  # [hidden_size]
    out,  # [num_tokens, hidden_size]
    num_tokens,
    x_stride,
    residual_stride,
    out_stride,
    eps,
    hidden_size: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    NUM_PIECES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    # grid: (ceil(num_tokens / BLOCK_ROWS),)
    my_rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    is_row = my_rows < num_tokens
    my_rows = my_rows.to(tl.int64)
    columns = tl.arange(0, BLOCK_WIDTH)[None, :]
    my_x = x + my_rows * x_stride + columns
    my_residual = residual + my_rows * residual_stride + columns
    my_weight = weight + tl.zeros_like(my_rows) + columns
    # Every load comes before the first store: the compiler moves none across one.
    scales = ()
    for piece in tl.static_range(NUM_PIECES):
        mask = piece * BLOCK_WIDTH + columns < hidden_size
        scale = my_weight + piece * BLOCK_WIDTH
        scale = tl.load(scale, mask=mask, other=0.0, eviction_policy="evict_last")
        scales += (scale,)
    wait_for_predecessor()
    values = ()
    addends = ()
    for piece in tl.static_range(NUM_PIECES):
        mask = is_row & (piece * BLOCK_WIDTH + columns < hidden_size)
        values += (tl.load(my_x + piece * BLOCK_WIDTH, mask=mask, other=0.0),)
        if HAS_RESIDUAL:
            addends += (tl.load(my_residual + piece * BLOCK_WIDTH, mask=mask, other=0.0),)
    squares = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
    summed = ()
    for piece in tl.static_range(NUM_PIECES):
        value = values[piece].to(tl.float32)
        if HAS_RESIDUAL:
            mask = is_row & (piece * BLOCK_WIDTH + columns < hidden_size)
            rounded = (value + addends[piece].to(tl.float32)).to(residual.dtype.element_ty)
            tl.store(my_residual + piece * BLOCK_WIDTH, rounded, mask=mask)
            value = rounded.to(tl.float32)
        summed += (value,)
        squares += value * value
    inverse = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / hidden_size + eps)
    my_out = out + my_rows * out_stride + columns
    for piece in tl.static_range(NUM_PIECES):
        mask = is_row & (piece * BLOCK_WIDTH + columns < hidden_size)
        normed = summed[piece] * inverse * scales[piece].to(tl.float32)
        tl.store(my_out + piece * BLOCK_WIDTH, normed.to(out.dtype.element_ty), mask=mask)
