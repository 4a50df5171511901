"""The embeddings of a batch's tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from tandem.kernels.dependent_launch import launch_options, wait_for_predecessor
from tandem.kernels.sizes import cdiv, next_power_of_2
from tandem.kernels.tuned import VECTOR_BYTES, WARP, num_multiprocessors, tuned_config


@dataclass(frozen=True, slots=True)
class EmbedConfig:
    """`block_width` columns of one token per program."""

    block_width: int
    num_warps: int


def embed(
    token_ids: torch.Tensor,  # [num_tokens], each in [0, vocab_size): not checked
    table: torch.Tensor,  # [vocab_size, hidden_size]
    out: torch.Tensor,  # [num_tokens, hidden_size]
    *,
    config: EmbedConfig | None = None,
) -> None:
    """Compute out = table[token_ids]."""
    num_tokens, hidden_size = out.shape
    if num_tokens == 0:
        return
    assert token_ids.shape == (num_tokens,) and token_ids.stride(0) == 1
    assert table.shape[1] == hidden_size and table.dtype == out.dtype
    assert table.stride(1) == 1 and out.stride(1) == 1
    if config is None:
        few = num_tokens < 2 * num_multiprocessors(out.device)
        shape = {"hidden_size": hidden_size, "element_bytes": out.element_size()}
        config = tuned_config(default_config(few, **shape), "embed", few_tokens=int(few), **shape)
    num_pieces = cdiv(hidden_size, config.block_width)
    _embed_kernel[(num_tokens * num_pieces,)](
        token_ids,
        table,
        out,
        table.stride(0),
        out.stride(0),
        hidden_size=hidden_size,
        NUM_PIECES=num_pieces,
        BLOCK_WIDTH=config.block_width,
        num_warps=config.num_warps,
        **launch_options(),
    )


@cache
def default_config(few_tokens: bool, hidden_size: int, element_bytes: int) -> EmbedConfig:
    """Return four vectors of a row per thread, or one for few tokens, spread over the chip."""
    num_warps, num_vectors = (2, 1) if few_tokens else (4, 4)
    block_width = num_vectors * num_warps * WARP * VECTOR_BYTES // element_bytes
    return EmbedConfig(min(block_width, next_power_of_2(hidden_size)), num_warps)


def candidates(hidden_size: int, element_bytes: int) -> Iterator[EmbedConfig]:
    """Yield the configurations worth measuring: one to eight vectors per thread."""
    for num_warps in (1, 2, 4, 8):
        for num_vectors in (1, 2, 4, 8):
            block_width = num_vectors * num_warps * WARP * VECTOR_BYTES // element_bytes
            if block_width < 2 * hidden_size:
                yield EmbedConfig(block_width, num_warps)


@triton.jit  # type: ignore[untyped-decorator]
def _embed_kernel(  # type: ignore[no-untyped-def]
    token_ids,  # [num_tokens]
    table,  # [vocab_size, hidden_size]
    out,  # [num_tokens, hidden_size]
    table_stride,
    out_stride,
    hidden_size: tl.constexpr,
    NUM_PIECES: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    # grid: (num_tokens * NUM_PIECES,), the pieces of a token side by side
    my_token = (tl.program_id(0) // NUM_PIECES).to(tl.int64)
    my_columns = tl.program_id(0) % NUM_PIECES * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    mask = my_columns < hidden_size
    wait_for_predecessor()
    my_id = tl.load(token_ids + my_token).to(tl.int64)
    values = tl.load(table + my_id * table_stride + my_columns, mask=mask)
    tl.store(out + my_token * out_stride + my_columns, values, mask=mask)
