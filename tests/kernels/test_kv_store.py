"""Storing keys and values: exact, and nothing but the named slots."""

from collections.abc import Callable

import pytest
import torch

from tandem.kernels import kv_store, reference

launchers = pytest.mark.parametrize(
    "store",
    [pytest.param(kv_store.store_kv, id="triton"), pytest.param(reference.store_kv, id="torch")],
)


@launchers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("slots", "num_kv_heads", "head_dim", "block_size"),
    [
        ([5], 1, 8, 4),
        ([0, 1, 2, 3, 12, 13, 27], 2, 24, 4),
        ([31, 7, 16], 3, 16, 16),
        ([], 2, 16, 4),
    ],
)
def test_every_token_lands_in_its_slot_and_nowhere_else(
    store: Callable[..., None],
    device: str,
    dtype: torch.dtype,
    slots: list[int],
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
) -> None:
    shape = (9, 3, 2, num_kv_heads, block_size, head_dim)
    pool = torch.full(shape, -3.0, dtype=dtype, device=device)
    # Keys and values as the model hands them over: the end of the fused projection.
    fused = torch.randn(len(slots), 2 + 2 * num_kv_heads, head_dim, device=device).to(dtype)
    kv = fused[:, 2:].view(len(slots), 2, num_kv_heads, head_dim)
    expected = pool.clone()
    for token, slot in enumerate(slots):
        expected[slot // block_size, 1, :, :, slot % block_size] = kv[token]
    store(kv, pool[:, 1], torch.tensor(slots, dtype=torch.int64, device=device))
    assert torch.equal(pool, expected)
