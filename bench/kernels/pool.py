"""A pool of random keys and values to measure on, and attention over it in float64."""

from collections.abc import Sequence

import torch

from tandem.bench.report.setting import Setting

CHUNK_VALUES = 1 << 28


class Pool:
    """One layout for every block size: `[num_blocks, num_layers, 2, heads, block_size, head_dim]`.

    Layers are what calls rotate through, as those of a model do.
    """

    def __init__(
        self, num_positions: int, num_layers: int, num_kv_heads: int, head_dim: int, of: Setting
    ) -> None:
        self._record = (num_layers, 2, num_kv_heads)
        self.num_positions, self.num_layers, self.head_dim = num_positions, num_layers, head_dim
        self.num_kv_heads = num_kv_heads
        num_values = num_positions * num_layers * 2 * num_kv_heads * head_dim
        self._values = torch.empty(num_values, dtype=of.dtype, device=of.device)
        for start in range(0, num_values, CHUNK_VALUES):
            self._values[start : start + CHUNK_VALUES].normal_()

    @property
    def token_bytes(self) -> int:
        """Of one position's keys and values in one layer."""
        return 2 * self._record[2] * self.head_dim * self._values.element_size()

    def blocks(self, block_size: int) -> torch.Tensor:
        """Return [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]"""
        return self._values.view(
            self.num_positions // block_size, *self._record, block_size, self.head_dim
        )

    def layer(self, index: int, block_size: int) -> torch.Tensor:
        """Return [num_blocks, 2, num_kv_heads, block_size, head_dim] of a layer, modulo all."""
        return self.blocks(block_size)[:, index % self.num_layers]

    def tables(
        self, lens: Sequence[int], block_size: int, *, shuffled: bool, seed: int = 0
    ) -> torch.Tensor:
        """Return block tables [num_seqs, max_blocks] of sequences that share no block."""
        counts = [-(-length // block_size) for length in lens]
        num_blocks = self.num_positions // block_size
        draw = torch.Generator().manual_seed(seed)
        order = torch.randperm(num_blocks, generator=draw) if shuffled else torch.arange(num_blocks)
        rows = torch.split_with_sizes(order[: sum(counts)], counts)
        padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
        return padded.to(self._values.device)


def context_of(
    kv_cache: torch.Tensor, table: torch.Tensor, context_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [context_len, num_kv_heads, head_dim] of one sequence."""
    num_kv_heads, block_size, head_dim = kv_cache.shape[2:]
    blocks = kv_cache[table[: -(-context_len // block_size)]]
    flat = blocks.permute(1, 0, 3, 2, 4).reshape(2, -1, num_kv_heads, head_dim)[:, :context_len]
    return flat[0], flat[1]


def attend(
    q: torch.Tensor,  # [num_rows, num_heads, head_dim]
    positions: torch.Tensor,  # [num_rows] of each row in its sequence
    keys: torch.Tensor,  # [context_len, num_kv_heads, head_dim]
    values: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return the causal attention of some rows of one sequence, in float64."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    grouped = q.double().view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("nhgd,khd->nhgk", grouped, keys.double()) * scale
    hidden = torch.arange(len(keys), device=q.device)[None, :] > positions[:, None]
    weights = scores.masked_fill_(hidden[:, None, None, :], float("-inf")).softmax(-1)
    return torch.einsum("nhgk,khd->nhgd", weights, values.double()).reshape(q.shape)
