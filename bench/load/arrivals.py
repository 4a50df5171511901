"""When requests are due in an open loop. Pure."""

import random
from collections.abc import Iterator
from typing import Literal

Arrival = Literal["poisson", "constant"]


def arrival_offsets_s(rate: float, arrival: Arrival, seed: int) -> Iterator[float]:
    """Seconds after the start at which requests are due, without end, at `rate` per second.

    The first is due at once. Poisson draws exponential gaps from `seed` alone.
    """
    if not rate > 0:
        raise ValueError(f"request rate must be above 0 per second, not {rate:g}")
    draws = random.Random(f"arrivals/{seed}")
    offset_s = 0.0
    while True:
        yield offset_s
        offset_s += draws.expovariate(rate) if arrival == "poisson" else 1 / rate
