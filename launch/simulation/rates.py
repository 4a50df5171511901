"""The highest rate of a load that keeps its targets, by bisection. Pure."""

import math
from collections.abc import Callable, Mapping

from tandem.bench.load.metrics import parse_slos
from tandem.decode.config import DisaggConfig
from tandem.runtime.errors import ConfigError

STEP = 1.02  # rates are its powers
FIRST_LEAP = 4  # steps, doubled until a rate is kept and a higher one is not
LEAST_SHARE = 0.02


def highest_rate(keeps: Callable[[float], bool], guess: float) -> float:
    """Return the highest rate that `keeps`, to 2 %; 0 if it is below LEAST_SHARE of the guess.

    `keeps` should be True up to a rate and False above it. Guesses near it save calls.
    """
    found: dict[int, bool] = {}

    def kept(at: int) -> bool:
        if at not in found:
            found[at] = keeps(STEP**at)
        return found[at]

    first, leap = round(math.log(guess, STEP)), FIRST_LEAP
    low = high = first
    if kept(first):
        while kept(high := low + leap):
            low, leap = high, 2 * leap
    else:
        while not kept(low := high - leap):
            high, leap = low, 2 * leap
            if STEP**low < LEAST_SHARE * guess:
                return 0.0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if kept(middle) else (low, middle)
    return STEP**low


def disagg_of(slos: Mapping[str, float]) -> DisaggConfig:
    """Return the config of workers that have limits in ms as their targets."""
    return DisaggConfig(ttft_target_ms=slos["ttft"], itl_target_ms=slos["tpot"])


def both_targets(text: str) -> dict[str, float]:
    """Return the limits in ms of `ttft` and `tpot`. Raises ConfigError without either."""
    slos = parse_slos([text])
    if set(slos) != {"ttft", "tpot"}:
        raise ConfigError("--targets: a ttft and a tpot, as ttft:1000 tpot:20")
    return slos
