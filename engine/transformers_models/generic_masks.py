"""The masks that a family's own code makes, as rules: which positions a token sees of those before.

transformers makes a mask by a function that is registered for an implementation of attention. The
one of PROBE keeps the rule and makes no numbers, so that the probe, on no device, can compare what
a family masks with what its layers ask of attention: a window that only the mask knows is seen.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionMaskInterface

PROBE = "tandem probe"
_RULE = "_tandem_rule"  # an attribute of a mask
_NUM_DRAWN = 64  # positions that are compared beside those at the edges

# (sequence, head, position of a query, position of a key) |-> the query sees the key
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def rule_of(mask: torch.Tensor | None) -> Rule | None:
    """Return the rule of a mask that was made for PROBE; None for any other."""
    return getattr(mask, _RULE, None)


def is_window(rule: Rule, window: int, longest: int) -> bool | None:
    """Return whether a rule is a causal window over `longest` positions; 0: all before are seen.

    None: the rule reads numbers that a probe does not have. Positions at all edges of the window
    are compared, and some between.
    """
    draw = torch.Generator().manual_seed(0)
    between = torch.randint(longest, (_NUM_DRAWN,), generator=draw)
    edges = [0, 1, window - 1, window, window + 1, 2 * window, longest // 2, longest - 1]
    queries = torch.cat([torch.tensor(edges), between])
    steps = torch.tensor([-1, 0, 1, window - 1, window, window + 1])
    q = queries[(queries >= 0) & (queries < longest), None]
    far = torch.cat([torch.zeros(1, dtype=torch.int64), between]).expand(len(q), -1)
    keys = torch.cat([q - steps, far], dim=1).clamp(0, longest - 1)
    zero = torch.zeros((), dtype=torch.int64)
    seen = (keys <= q) & (keys > q - window if window else True)
    try:
        shown = rule(zero, zero, q.expand_as(keys), keys)
    except (RuntimeError, IndexError):  # by tensors of the probe, on no device
        return None
    return None if shown.is_meta else torch.equal(shown.expand_as(seen), seen)


def _mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Rule, **_: Any
) -> torch.Tensor:
    shape = batch_size, 1, q_length, kv_length
    mask = torch.empty(shape, dtype=torch.bool, device="meta")
    setattr(mask, _RULE, mask_function)
    return mask


AttentionMaskInterface.register(PROBE, _mask)
