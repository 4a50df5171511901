"""The options of a router of experts; needs no PyTorch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Routing:
    """The choice of `num_chosen` experts by their scores, and the weights of their results."""

    num_chosen: int
    is_sigmoid: bool = False  # scores are sigmoids of the logits, or else their softmax
    is_renormalized: bool = True  # the weights of a token's experts are divided by their sum
    scale: float = 1.0  # of the weights
    num_groups: int = 1  # equal parts of the experts, for sigmoids
    num_open_groups: int = 1  # the groups to choose from, by the sum of their two best scores
