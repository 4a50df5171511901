"""The figures of a comparison: each engine's own, and the first engine's ratios to the others."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tandem.bench.report.figures import Figure, at_least, at_most

VLLM, TRANSFORMERS = "vllm", "transformers"
READY_TARGET = at_most(10.0)

Rounds = Mapping[str, Mapping[str, Sequence[float]]]  # engine |-> figure |-> sample by round


@dataclass(frozen=True, slots=True)
class Kind:
    """A figure, and the least factor by which the first engine should be faster."""

    label: str
    unit: str
    better: Literal["less", "more", ""]
    targets: Mapping[str, float] = field(default_factory=dict)  # engine |-> factor

    def factor(self, ours: float, theirs: float) -> float:
        """Return how many times as fast ours is."""
        above, below = (theirs, ours) if self.better == "less" else (ours, theirs)
        return above / below


KINDS: Mapping[str, Kind] = {
    "ready_s": Kind("ready to serve", "s", "less"),
    "ttft_ms": Kind("TTFT alone", "ms", "less", {VLLM: 1.0}),
    "itl_alone_ms": Kind("ITL alone", "ms", "less", {VLLM: 1.0}),
    "itl_mixed_ms": Kind("ITL mixed", "ms", "less", {VLLM: 1.0}),
    "tokens_per_s": Kind("tokens mixed", "1/s", "more", {VLLM: 1.0, TRANSFORMERS: 2.0}),
    "gap_alone_ms": Kind("gap alone", "ms", "less"),
    "gap_mixed_ms": Kind("gap mixed", "ms", "less"),
    "gap_mixed_p99_ms": Kind("gap mixed p99", "ms", "less"),
    "ttft_mixed_ms": Kind("TTFT mixed", "ms", "less"),
    "itl_mixed_mean_ms": Kind("ITL mixed, mean", "ms", "less"),
    "request_mixed_mean_ms": Kind("request mixed, mean", "ms", "less"),
    "cpu_alone_s": Kind("CPU time alone", "s", "less"),
    "cpu_mixed_s": Kind("CPU time mixed", "s", "less"),
    "cores_alone": Kind("cores busy alone", "cores", ""),
    "cores_mixed": Kind("cores busy mixed", "cores", ""),
}


def figures_of_case(label: str, rounds: Rounds) -> Iterator[Figure]:
    """Yield the figures of a case; the first engine is the one compared with the rest."""
    key = label.replace(", ", "_").replace(" ", "_")
    ours = next(iter(rounds))
    for name, kind in KINDS.items():
        for engine, samples in rounds.items():
            target = READY_TARGET if engine == ours and name == "ready_s" else None
            words = f"{label}: {kind.label}, {engine}"
            yield Figure(f"{key}_{name}_{engine}", words, kind.unit, tuple(samples[name]), target)
        for engine in list(rounds)[1:]:
            pairs = list(zip(rounds[ours][name], rounds[engine][name], strict=True))
            if not kind.better or any(not one or not other for one, other in pairs):
                continue
            factor = kind.targets.get(engine)
            yield Figure(
                f"{key}_{name}_vs_{engine}",
                f"  {ours} is faster than {engine} by",
                "x",
                tuple(kind.factor(*pair) for pair in pairs),
                None if factor is None else at_least(factor),
            )
