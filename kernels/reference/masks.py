"""The PyTorch reference implementation of tandem.kernels.sampling.masks."""

import torch

from tandem.kernels.sampling.rows import TokenMasks


def mask_logits(
    logits: torch.Tensor,  # [num_rows, vocab_size], changed in place
    masks: TokenMasks,
) -> None:
    """Put -inf where a masked row may not draw a token."""
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (masks.bits.unsqueeze(-1) >> shifts & 1).flatten(1)[:, : logits.shape[1]]
    masked = logits.index_select(0, masks.rows).masked_fill_(allowed == 0, float("-inf"))
    logits.index_copy_(0, masks.rows, masked)
