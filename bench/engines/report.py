"""The figures of a comparison: each engine's own, and the first engine's ratios to the others."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.bench.engines.load import Turn
from tandem.bench.report.figures import Figure, at_least, at_most

VLLM, TRANSFORMERS = "vllm", "transformers"
READY_TARGET = at_most(10.0)

Turns = Mapping[str, Turn]  # of one round and engine, by their load


@dataclass(frozen=True, slots=True)
class Kind:
    """A figure, and the least factor by which the first engine should be better."""

    label: str
    unit: str
    value: Callable[[Turns], float]
    targets: Mapping[str, float] = field(default_factory=dict)  # engine |-> factor

    def factor(self, ours: float, theirs: float) -> float:
        """Return how many times as good ours is."""
        return ours / theirs if self.unit.endswith("/s") else theirs / ours


def _latency(load: str, metric: str, mark: str) -> Callable[[Turns], float]:
    """Return the reader of a mark of a latency in ms; 0 of gaps where answers came as one event."""

    def value(turns: Turns) -> float:
        spread = turns[load].summary.latencies_ms.get(metric)
        return 0.0 if spread is None else float(getattr(spread, mark))

    return value


KINDS: Mapping[str, Kind] = {
    "ttft_ms": Kind("TTFT alone", "ms", _latency("alone", "ttft", "p50"), {VLLM: 1.0}),
    "itl_alone_ms": Kind("ITL alone", "ms", _latency("alone", "tpot", "p50"), {VLLM: 1.0}),
    "itl_mixed_ms": Kind("ITL mixed", "ms", _latency("mixed", "tpot", "p50"), {VLLM: 1.0}),
    "tokens_per_s": Kind(
        "tokens mixed",
        "1/s",
        lambda turns: turns["mixed"].summary.output_token_throughput,
        {VLLM: 1.0, TRANSFORMERS: 2.0},
    ),
    "gap_mixed_p99_ms": Kind("gap mixed p99", "ms", _latency("mixed", "itl", "p99")),
    "ttft_mixed_ms": Kind("TTFT mixed", "ms", _latency("mixed", "ttft", "p50")),
    "itl_mixed_mean_ms": Kind("ITL mixed, mean", "ms", _latency("mixed", "tpot", "mean")),
    "request_mixed_mean_ms": Kind("request mixed, mean", "ms", _latency("mixed", "e2el", "mean")),
    "cpu_alone_s": Kind("CPU time alone", "s", lambda turns: turns["alone"].cpu_s),
    "cpu_mixed_s": Kind("CPU time mixed", "s", lambda turns: turns["mixed"].cpu_s),
}


def figures_of_case(
    label: str, ready_s: Mapping[str, float], rounds: Mapping[str, Sequence[Turns]]
) -> Iterator[Figure]:
    """Yield the figures of a case; the first engine is the one compared with the rest.

    Both are by engine: `ready_s` is the time of its start, `rounds` its turns.
    """
    key = label.replace(", ", "_").replace(" ", "_")
    ours = next(iter(rounds))
    for engine, seconds in ready_s.items():
        target = READY_TARGET if engine == ours else None
        words = f"{label}: ready to serve, {engine}"
        yield Figure(f"{key}_ready_s_{engine}", words, "s", (seconds,), target)
    for name, kind in KINDS.items():
        samples = {engine: tuple(map(kind.value, turns)) for engine, turns in rounds.items()}
        for engine, values in samples.items():
            words = f"{label}: {kind.label}, {engine}"
            yield Figure(f"{key}_{name}_{engine}", words, kind.unit, values)
        for engine in list(rounds)[1:]:
            if not all((*samples[ours], *samples[engine])):
                continue
            least = kind.targets.get(engine)
            yield Figure(
                f"{key}_{name}_vs_{engine}",
                f"  {ours} is better than {engine} by",
                "x",
                tuple(map(kind.factor, samples[ours], samples[engine])),
                None if least is None else at_least(least),
            )
