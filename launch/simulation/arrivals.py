"""The loads of simulated comparisons at any rate, and the search for the highest that is kept."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tandem.bench.load.trace import TraceWorkload, read_trace
from tandem.launch.simulation.load import PlannedRequest, requests_of_trace
from tandem.runtime.errors import ConfigError

Arrivals = list[tuple[PlannedRequest, float]]  # a request, and the seconds after the start

PHASE_S = 10.0  # of a load that swings
STEP = 1.02  # rates are its powers
FIRST_LEAP = 4  # steps, doubled until a rate is kept and a higher one is not
LEAST_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Kind:
    """Alike requests, and their part of a load's rate."""

    num_prompt_tokens: int
    num_answer_tokens: int
    share: float = 1.0


LONG, SHORT = Kind(6000, 60), Kind(300, 250)
MIX = (Kind(6000, 60, 0.2), Kind(300, 250, 0.8))
CORNERS: dict[str, tuple[Kind, ...]] = {
    "long in, short out": (LONG,),
    "short in, long out": (SHORT,),
    "mix": MIX,
    "swinging": MIX,  # each kind for PHASE_S alone, at the rate that the mix has of it, twice
}


def corner(name: str, rate: float, seconds: float, seed: int) -> Arrivals:
    """Return Poisson arrivals of `rate` requests/s for `seconds`; a faster load is a denser one."""
    rng = random.Random(f"{name}/{seed}")
    kinds = CORNERS[name]
    offsets = [
        (offset_s, kind)
        for index, kind in enumerate(kinds)
        for offset_s in _offsets(rng, name == "swinging", index, kind.share * rate, seconds)
    ]
    offsets.sort(key=lambda each: each[0])
    return [
        (PlannedRequest(i, kind.num_prompt_tokens, kind.num_answer_tokens, [], at_s), at_s)
        for i, (at_s, kind) in enumerate(offsets)
    ]


def _offsets(
    rng: random.Random, swings: bool, index: int, rate: float, seconds: float
) -> Iterator[float]:
    """Yield the arrivals of one kind; where the load swings those of its own phases only."""
    share = 2 if swings else 1
    offset_s = rng.expovariate(rate * share)
    while offset_s < seconds:
        if not swings or int(offset_s / PHASE_S) % 2 == index:
            yield offset_s
        offset_s += rng.expovariate(rate * share)


def of_trace(
    path: Path, rate: float, seconds: float, seed: int, block_size: int, max_tokens: int
) -> Arrivals:
    """Return `seconds` of a trace from a place that `seed` chooses, scaled to `rate` requests/s.

    Requests of one tick of its clock are spread over it. Those that no worker can hold are left
    out. Raises ConfigError for a bad file, or one with too few requests.
    """
    requests = _requests(path, block_size, max_tokens)
    num_wanted = max(2, round(rate * seconds))
    first = random.Random(f"{path.name}/{seed}").randrange(len(requests) // 2)
    if first + num_wanted > len(requests):
        raise ConfigError(f"trace {path}: too short for {num_wanted} requests: fewer --seconds")
    chosen = requests[first : first + num_wanted]
    (_, start_s), (_, end_s) = chosen[0], chosen[-1]
    if not end_s > start_s:
        raise ConfigError(f"trace {path}: {num_wanted} requests arrive all at once")
    scale = seconds / (end_s - start_s)
    return [(each, (at_s - start_s) * scale) for each, at_s in chosen]


@cache
def _requests(path: Path, block_size: int, max_tokens: int) -> Arrivals:
    workload = TraceWorkload(str(path), read_trace(path))
    requests = list(requests_of_trace(workload, block_size))
    times = _spread([each.offset_s or 0.0 for each in requests])
    return [
        (each, at_s)
        for each, at_s in zip(requests, times, strict=True)
        if each.num_prompt_tokens + each.num_answer_tokens <= max_tokens
    ]


def _spread(times: Sequence[float]) -> list[float]:
    """Return ascending times, those of one moment spread evenly up to the next moment.

    Traces count in ticks, as of 3 s, in which dozens of requests came.
    """
    moments = sorted(set(times))
    later = dict(itertools.pairwise(moments))
    counts, seen, spread = Counter(times), Counter[float](), []
    for at_s in times:
        gap_s = later.get(at_s, at_s) - at_s
        spread.append(at_s + gap_s * seen[at_s] / counts[at_s])
        seen[at_s] += 1
    return spread


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
