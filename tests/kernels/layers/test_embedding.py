"""Embeddings are copied exactly."""

from collections.abc import Callable

import pytest
import torch

from tandem.kernels.layers import embedding
from tandem.kernels.reference import embedding as reference
from tests.kernels.tolerance import launchers

kinds = launchers("embed", embedding.embed, reference.embed)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
def test_each_token_gets_its_row(
    embed: Callable[..., None], device: str, dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    for width, num_tokens in ((1, 1), (8, 9), (37, 9), (1160, 1), (1160, 9)):
        wide = torch.randn(11, width + 3).to(dtype).to(device)
        table = wide[:, 1 : width + 1]
        ids = (torch.arange(num_tokens, dtype=index_dtype, device=device) * 7 + 10) % 11
        out = torch.full((num_tokens, width), float("nan"), dtype=dtype, device=device)
        embed(ids, table, out)
        assert torch.equal(out, table[ids.long()])


@kinds
def test_no_tokens_are_no_work(embed: Callable[..., None], device: str) -> None:
    ids = torch.empty(0, dtype=torch.int64, device=device)
    embed(ids, torch.empty(4, 8, device=device), torch.empty(0, 8, device=device))


def test_every_candidate_copies(device: str) -> None:
    table = torch.randn(5, 1160, device=device).half()
    ids = torch.tensor([4, 0], device=device)
    for config in embedding.candidates(1160, 2):
        out = torch.full_like(table[:2], float("nan"))
        embedding.embed(ids, table, out, config=config)
        assert torch.equal(out, table[ids])
