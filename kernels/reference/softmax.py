"""The softmax of both attentions' reference implementations."""

import torch


def weights_of(
    scores: torch.Tensor,  # [n, num_rows, num_seen]
    sinks: torch.Tensor | None,  # [n, num_rows or 1, 1]: one more score of each row, of no position
) -> torch.Tensor:
    """Return softmax(scores) over the last dimension, without the weights of `sinks`."""
    if sinks is None:
        return scores.softmax(-1)
    of_rows = sinks.expand(*scores.shape[:2], 1)
    return torch.cat([scores, of_rows], -1).softmax(-1)[..., :-1]
