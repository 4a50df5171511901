"""The last minute, as differences of counts that only grow. Pure."""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping

WINDOW_S = 60.0
Key = tuple[str, ...]  # kind of the count, then its labels
Counts = Mapping[Key, float]


class Window:
    """Samples of the counts of every source: one process, from its start to its end."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Mapping[str, Counts]]] = deque()

    @property
    def covered_s(self) -> float:
        """The time between the first and the last sample."""
        return self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0

    def add(self, now_s: float, counts: Mapping[str, Counts]) -> None:
        """Add a sample, and drop those before the window."""
        self._samples.append((now_s, counts))
        while len(self._samples) > 1 and self._samples[1][0] <= now_s - WINDOW_S:
            self._samples.popleft()

    def grown(self) -> dict[Key, float]:
        """Return the growth of each count over the window, of all sources together.

        A source that a sample lacks did not answer then; its other samples count.
        """
        first: dict[str, Counts] = {}
        last: dict[str, Counts] = {}
        for _, counts in self._samples:
            first = {**counts, **first}
            last |= counts
        total: dict[Key, float] = defaultdict(float)
        for source, ends in last.items():
            for key, value in ends.items():
                total[key] += value - first[source].get(key, 0)
        return total


def of_kind(counts: Mapping[Key, float], kind: str) -> Iterator[tuple[Key, float]]:
    """Yield labels and values of one kind."""
    for (found, *labels), value in counts.items():
        if found == kind:
            yield tuple(labels), value


def quantile_ms(buckets: Mapping[float, float], share: float) -> float | None:
    """Return a quantile in ms, on a line through its bucket; None without values.

    `buckets` is upper bound in seconds |-> number of values up to it. A value above the last finite
    bound counts as that.
    """
    bounds = sorted(buckets)
    rank = share * max(buckets.values(), default=0)
    if rank <= 0:
        return None
    low_s = below = 0.0
    for bound_s in bounds:
        if buckets[bound_s] >= rank:
            if bound_s == float("inf"):
                break
            inside = (rank - below) / (buckets[bound_s] - below)
            return (low_s + (bound_s - low_s) * inside) * 1e3
        low_s, below = bound_s, buckets[bound_s]
    return low_s * 1e3
