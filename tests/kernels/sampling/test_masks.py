"""Masks put -inf where a row may not draw, and leave everything else as it is."""

import math
from collections.abc import Callable

import pytest
import torch

from tandem.kernels.cpu import launch as in_c
from tandem.kernels.reference import masks as reference
from tandem.kernels.sampling import masks
from tandem.kernels.sampling.rows import TokenMasks
from tests.kernels.conftest import DEVICE
from tests.kernels.tolerance import DTYPES

Mask = Callable[[torch.Tensor, TokenMasks], None]

kinds = pytest.mark.parametrize(
    ("mask", "device"),
    [
        pytest.param(masks.mask_logits, DEVICE, id="triton"),
        pytest.param(in_c.mask_logits, "cpu", id="c"),
        pytest.param(reference.mask_logits, DEVICE, id="torch"),
    ],
)


def as_bits(allowed: list[list[bool]]) -> torch.Tensor:
    """The words that hold `allowed`, written out by hand."""
    words = []
    for row in allowed:
        bits = sum(1 << token_id for token_id, is_allowed in enumerate(row) if is_allowed)
        num_words = -(-len(row) // 32)
        words.append([bits >> 32 * word & 0xFFFFFFFF for word in range(num_words)])
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


@kinds
@pytest.mark.parametrize("dtype", DTYPES)
def test_only_the_tokens_of_a_mask_are_left(mask: Mask, device: str, dtype: torch.dtype) -> None:
    for vocab_size in (1, 31, 32, 33, 64, 100, 2048, 4173):
        draw = torch.Generator().manual_seed(vocab_size)
        logits = torch.randn(7, vocab_size, generator=draw).to(dtype)
        rows = [5, 0, 3]
        allowed = torch.rand(len(rows), vocab_size, generator=draw) < 0.3
        allowed[1] = True
        allowed[2] = False
        expected = logits.clone()
        for row, kept in zip(rows, allowed, strict=True):
            expected[row] = torch.where(kept, logits[row], -math.inf)
        found, bits = logits.to(device), as_bits(allowed.tolist()).to(device)
        mask(found, TokenMasks(torch.tensor(rows, device=device), bits))
        assert torch.equal(found.cpu(), expected)


@kinds
def test_rows_may_lie_apart(mask: Mask, device: str) -> None:
    whole = torch.zeros(3, 100, device=device)
    mask(
        whole[:, :70],
        TokenMasks(torch.tensor([1], device=device), torch.zeros(1, 3).int().to(device)),
    )
    expected = torch.zeros(3, 100)
    expected[1, :70] = -math.inf
    assert torch.equal(whole.cpu(), expected)
