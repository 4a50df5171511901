"""Counters by which the last program of a piece of work adds up what the others have left."""

from functools import cache

import torch

MAX_ARRIVALS = 1 << 16  # pieces of work in a launch


@cache
def arrivals(device: torch.device) -> torch.Tensor:
    """Return int32 [MAX_ARRIVALS], zero between launches.

    Launches that count with them must not overlap, and the first must not be captured into a graph.
    """
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
    return torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=device)
