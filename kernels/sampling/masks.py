"""Masks of rows whose answers follow a grammar: one pass that writes, before a row is sampled."""

import torch
import triton
import triton.language as tl

from tandem.kernels.dependent_launch import launch_options, wait_for_predecessor
from tandem.kernels.sampling.rows import TokenMasks
from tandem.kernels.sizes import cdiv

TILE_WORDS = 64


# The number of words and the rows' distance are of the model, and most are not multiples of 16.
@triton.jit  # type: ignore[untyped-decorator]
def mask_kernel(  # type: ignore[no-untyped-def]
    logits,  # [num_rows, vocab_size], changed in place
    logits_stride_row,
    rows,  # [num_masked]
    bits,  # int32 [num_masked, num_words]
    vocab_size,
    num_words,
    TILE_WORDS: tl.constexpr,
):
    # grid: (num_masked, cdiv(num_words, TILE_WORDS))
    my_place = tl.program_id(0).to(tl.int64)
    wait_for_predecessor()
    my_row = tl.load(rows + my_place).to(tl.int64)
    words = tl.program_id(1) * TILE_WORDS + tl.arange(0, TILE_WORDS)
    my_bits = tl.load(bits + my_place * num_words + words, mask=words < num_words, other=0)
    lanes = tl.arange(0, 32)
    ids = words[:, None] * 32 + lanes[None, :]
    refused = ((my_bits[:, None] >> lanes[None, :]) & 1) == 0
    removed = tl.full([TILE_WORDS, 32], float("-inf"), tl.float32).to(logits.dtype.element_ty)
    places = logits + my_row * logits_stride_row + ids
    tl.store(places, removed, mask=refused & (ids < vocab_size))


def mask_logits(
    logits: torch.Tensor,  # [num_rows, vocab_size], changed in place
    masks: TokenMasks,
) -> None:
    """Put -inf where a masked row may not draw a token."""
    num_masked, num_words = masks.bits.shape
    assert masks.bits.dtype == torch.int32 and masks.bits.is_contiguous()
    assert num_words == cdiv(logits.shape[1], 32) and logits.stride(1) == 1
    mask_kernel[(num_masked, cdiv(num_words, TILE_WORDS))](
        logits,
        logits.stride(0),
        masks.rows,
        masks.bits,
        logits.shape[1],
        num_words,
        TILE_WORDS=TILE_WORDS,
        num_warps=4,
        **launch_options(),
    )
