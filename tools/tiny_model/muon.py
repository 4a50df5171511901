"""The Muon optimizer: momentum whose singular values are all made about one.

For matrices inside a network it needs about half the steps of AdamW. (K. Jordan et al., 2024,
"Muon: An optimizer for hidden layers in neural networks".)
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# An odd quintic that, iterated, takes every singular value in (0, 1] to about one; the paper's.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5

# An orthogonalized update of this RMS per entry is as large as a typical one of AdamW, so the two
# share their range of learning rates.
_UPDATE_RMS = 0.2


def orthogonalize(matrix: Tensor) -> Tensor:
    """The matrix [rows, columns] with its singular values replaced by about one, in bfloat16."""
    a, b, c = _QUINTIC
    x: Tensor = matrix.bfloat16()
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(_NUM_ITERATIONS):
        gram: Tensor = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay, for matrices only."""

    def __init__(
        self, matrices: Iterable[Tensor], lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient; `closure` is not supported."""
        assert closure is None
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["mean"] = torch.zeros_like(matrix)
                mean = state["mean"].lerp_(matrix.grad, 1 - momentum)
                update = orthogonalize(torch.lerp(matrix.grad, mean, momentum))
                scale = _UPDATE_RMS * max(matrix.shape) ** 0.5
                matrix.mul_(1 - lr * group["weight_decay"])
                matrix.add_(update.to(matrix.dtype), alpha=-lr * scale)
