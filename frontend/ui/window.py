"""The last minutes as differences of counts that only grow: latencies and causes of placements."""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import msgspec

from tandem.frontend.telemetry.metrics import FrontendMetrics, Histogram
from tandem.frontend.ui.recent import Cause, Recent
from tandem.frontend.ui.state import Latency, Placement

SLOT_S = 5.0
_NUM_SLOTS = 60
Counts = dict[str, list[int]]  # by model, one for each bucket


class _Sample(msgspec.Struct, frozen=True):
    at_s: float  # perf_counter
    counts: dict[str, Counts]  # by kind
    causes: Counter[Cause]


class Window:
    """Samples of the counts, one every `SLOT_S`; the first one is taken when a page opens."""

    def __init__(self, metrics: FrontendMetrics, recent: Recent) -> None:
        self._histograms: dict[str, Histogram] = {
            "ttft": metrics.time_to_first_token,
            "itl": metrics.inter_token_latency,
        }
        self._recent = recent
        self._samples: deque[_Sample] = deque(maxlen=_NUM_SLOTS)

    def clear(self) -> None:
        """Forget the samples."""
        self._samples.clear()

    def update(self, now: float) -> float:
        """Take a sample if one is due, and return the seconds that the window covers."""
        if not self._samples or now - self._samples[-1].at_s >= SLOT_S:
            self._samples.append(self._sample(now))
        return now - self._samples[0].at_s

    def placements(self) -> list[Placement]:
        """Return the causes in the window, the most frequent first."""
        counts = self._recent.causes - self._samples[0].causes
        return [
            Placement(place, cause, num, self._recent.examples[place, cause])
            for (place, cause), num in counts.most_common()
        ]

    def latencies(self, targets_ms: Mapping[str, Mapping[str, float | None]]) -> Iterator[Latency]:
        """Yield the latencies of each model; `targets_ms` is model |-> kind |-> target."""
        present = self._sample(0.0)
        for kind, histogram in self._histograms.items():
            bounds = histogram.fine_bounds
            for model, counts in present.counts[kind].items():
                samples = [sample.counts[kind].get(model, []) for sample in self._samples]
                slots = [_minus(b, a) for a, b in pairwise([*samples, counts])]
                whole = _minus(counts, samples[0])
                target_ms = targets_ms.get(model, {}).get(kind)
                yield Latency(
                    model=model,
                    kind=kind,
                    target_ms=target_ms,
                    num=sum(whole),
                    median_ms=quantile_ms(bounds, whole, 0.5),
                    p95_ms=quantile_ms(bounds, whole, 0.95),
                    p95s_ms=[quantile_ms(bounds, slot, 0.95) for slot in slots],
                )

    def _sample(self, now: float) -> _Sample:
        counts = {kind: histogram.counts() for kind, histogram in self._histograms.items()}
        return _Sample(now, counts, self._recent.causes.copy())


def _minus(counts: list[int], before: list[int]) -> list[int]:
    return [a - b for a, b in zip(counts, before, strict=True)] if before else counts


def quantile_ms(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Return the quantile in milliseconds, on a line through its bucket; None without values.

    `bounds` are in seconds; a value above the last one counts as that.
    """
    cumulated = list(accumulate(counts))
    if not cumulated or not cumulated[-1]:
        return None
    rank = share * cumulated[-1]
    index = bisect_left(cumulated, rank)
    if index >= len(bounds):
        return bounds[-1] * 1e3
    low = bounds[index - 1] if index else 0.0
    inside = (rank - cumulated[index] + counts[index]) / counts[index]
    return (low + (bounds[index] - low) * inside) * 1e3
