"""The PyTorch reference implementation of tandem.kernels.layers.embedding."""

import torch


def embed(
    token_ids: torch.Tensor,  # [num_tokens], each in [0, vocab_size)
    table: torch.Tensor,  # [vocab_size, hidden_size]
    out: torch.Tensor,  # [num_tokens, hidden_size], its dtype may be wider than the table's
) -> None:
    """Compute out = table[token_ids]."""
    if out.dtype == table.dtype:
        torch.index_select(table, 0, token_ids, out=out)
    else:
        out.copy_(table.index_select(0, token_ids))
