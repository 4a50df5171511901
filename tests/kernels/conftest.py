"""Paged caches to test on. Without a GPU the kernels run under Triton's interpreter."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Read when Triton is imported, which is after this.
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


@dataclass
class Paged:
    """Sequences whose keys and values lie scattered over a poisoned pool."""

    kv_cache: torch.Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer of 3
    block_tables: torch.Tensor  # [num_seqs, max_blocks]
    context_lens: torch.Tensor  # [num_seqs]
    keys: list[torch.Tensor]  # per sequence [context_len, num_kv_heads, head_dim]
    values: list[torch.Tensor]

    def expect(
        self,
        q: torch.Tensor,
        row: int,
        scale: float,
        *,
        soft_cap: float = 0.0,
        window: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Dense causal attention of sequence `row`'s last len(q) tokens, in float64."""
        group_size = q.shape[1] // self.keys[row].shape[1]
        keys = self.keys[row].double().repeat_interleave(group_size, 1)
        values = self.values[row].double().repeat_interleave(group_size, 1)
        scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        positions = torch.arange(len(keys), device=q.device)
        own = positions[len(keys) - len(q) :, None]
        hidden = positions > own
        if window:
            hidden |= positions <= own - window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, len(q), 1)], -1)
        weights = scores.softmax(-1)[..., : len(keys)]
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


MakePaged = Callable[..., Paged]


@pytest.fixture
def make_paged() -> MakePaged:
    """make_paged(context_lens, num_kv_heads, head_dim, block_size, dtype, stale=...) -> Paged.

    `stale` fills every slot that belongs to no position, NaN by default; blocks that belong to no
    sequence are NaN always. Table entries past a sequence's context repeat its first block.
    """

    def make(
        context_lens: list[int],
        num_kv_heads: int = 2,
        head_dim: int = 16,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        stale: float = float("nan"),
    ) -> Paged:
        torch.manual_seed(sum(context_lens))
        counts = [-(-length // block_size) for length in context_lens]
        num_blocks, width = sum(counts) + 2, max(counts, default=1)
        shape = (num_blocks, 3, 2, num_kv_heads, block_size, head_dim)
        kv_cache = torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)[:, 1]
        free = (torch.randperm(num_blocks - 1) + 1).tolist()
        tables, keys, values = [], [], []
        for length, count in zip(context_lens, counts, strict=True):
            table = [free.pop() for _ in range(count)]
            tables.append(table + table[:1] * (width - count))
            kv = torch.randn(2, length, num_kv_heads, head_dim, device=DEVICE).to(dtype)
            keys.append(kv[0])
            values.append(kv[1])
            kv_cache[table] = stale
            for position in range(length):
                block, offset = table[position // block_size], position % block_size
                kv_cache[block, :, :, offset] = kv[:, position]
        return Paged(
            kv_cache,
            torch.tensor(tables, dtype=torch.int64, device=DEVICE).view(len(tables), width),
            torch.tensor(context_lens, dtype=torch.int64, device=DEVICE),
            keys,
            values,
        )

    return make


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture
def sums_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's products in the order of their inputs, as a tensor core's are.

    NumPy's order depends on a row's place in its tile.
    """
    if DEVICE != "cpu":
        return
    from triton.runtime import interpreter

    def dot(_builder: Any, a: Any, b: Any, total: Any, *_options: Any) -> Any:
        result = total.data.copy()
        for k in range(a.data.shape[1]):
            result += np.outer(a.data[:, k].astype(result.dtype), b.data[k])
        return interpreter.TensorHandle(result, total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.fixture
def compile_environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that compiles kernels rather than interpreting them."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"TRITON_CACHE_DIR": str(tmp_path)}
