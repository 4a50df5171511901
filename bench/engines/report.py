"""Rounds of several engines as medians, ratios and verdicts. Pure but for printing."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from tandem.bench.engines.presets import Case

READY_LIMIT_S = 10.0
VLLM, TRANSFORMERS = "vllm", "transformers"


@dataclass(frozen=True, slots=True)
class FigureKind:
    """What a figure is, and how many times as fast as another engine the first is to be."""

    label: str
    better: Literal["less", "more", ""]
    targets: Mapping[str, float] = field(default_factory=dict)  # engine |-> ratio

    def ratio(self, ours: float, theirs: float) -> float | None:
        """How many times as fast ours is; None where that means nothing."""
        above, below = (theirs, ours) if self.better == "less" else (ours, theirs)
        return above / below if self.better and below else None


KINDS: Mapping[str, FigureKind] = {
    "ready_s": FigureKind("ready to serve, s", "less"),
    "ttft_ms": FigureKind("TTFT alone, ms", "less", {VLLM: 1.0}),
    "itl_alone_ms": FigureKind("ITL alone, ms", "less", {VLLM: 1.0}),
    "itl_mixed_ms": FigureKind("ITL mixed, ms", "less", {VLLM: 1.0}),
    "tokens_per_s": FigureKind("tokens/s mixed", "more", {VLLM: 1.0, TRANSFORMERS: 2.0}),
    "gap_alone_ms": FigureKind("  gap alone, ms", "less"),
    "gap_mixed_ms": FigureKind("  gap mixed, ms", "less"),
    "gap_mixed_p99_ms": FigureKind("  gap mixed p99, ms", "less"),
    "ttft_mixed_ms": FigureKind("  TTFT mixed, ms", "less"),
    "itl_mixed_mean_ms": FigureKind("  ITL mixed, mean, ms", "less"),
    "request_mixed_mean_ms": FigureKind("  request mixed, mean, ms", "less"),
    "cpu_alone_s": FigureKind("  CPU time alone, s", "less"),
    "cpu_mixed_s": FigureKind("  CPU time mixed, s", "less"),
    "cores_alone": FigureKind("  cores busy alone", ""),
    "cores_mixed": FigureKind("  cores busy mixed", ""),
}


@dataclass(slots=True)
class CaseResult:
    """All rounds of all engines in one case; the first engine is the one compared to the rest."""

    case: Case
    rounds: dict[str, dict[str, list[float]]]  # engine |-> figure |-> value by round

    @property
    def ours(self) -> str:
        return next(iter(self.rounds))

    def median(self, engine: str, figure: str) -> float:
        return statistics.median(self.rounds[engine][figure])

    def ratio(self, engine: str, figure: str) -> float | None:
        """The median of `ratios`: above 1 the first engine is the faster.

        Rounds differ in their work and in the machine's pace, engines within a round do not.
        """
        ratios = [each for each in self.ratios(engine, figure) if each is not None]
        return statistics.median(ratios) if ratios else None

    def ratios(self, engine: str, figure: str) -> list[float | None]:
        """How many times as fast the first engine is, round by round."""
        pairs = zip(self.rounds[self.ours][figure], self.rounds[engine][figure], strict=True)
        return [KINDS[figure].ratio(ours, theirs) for ours, theirs in pairs]

    def is_met(self, engine: str, figure: str) -> bool | None:
        """Whether the first engine is as many times as fast as it is to be; None without target."""
        if engine == self.ours:
            is_start = figure == "ready_s"
            return self.median(engine, figure) <= READY_LIMIT_S if is_start else None
        target, ratio = KINDS[figure].targets.get(engine), self.ratio(engine, figure)
        return None if target is None or ratio is None else ratio >= target

    def target_text(self, engine: str, figure: str) -> str:
        if engine == self.ours:
            return f"<= {READY_LIMIT_S:g} s" if figure == "ready_s" else ""
        target = KINDS[figure].targets.get(engine)
        return "" if target is None else f">= {target:g}x"

    def to_json(self) -> dict[str, Any]:
        return {
            "dtype": self.case.dtype,
            "threads": self.case.threads,
            "figures": {
                figure: {
                    "label": KINDS[figure].label.strip(),
                    "engines": {engine: self._json(engine, figure) for engine in self.rounds},
                }
                for figure in KINDS
            },
        }

    def _json(self, engine: str, figure: str) -> dict[str, Any]:
        own = {"median": self.median(engine, figure), "rounds": self.rounds[engine][figure]}
        if engine == self.ours:
            return {**own, "is_met": self.is_met(engine, figure)}
        return {
            **own,
            "ratio": self.ratio(engine, figure),
            "ratios": self.ratios(engine, figure),
            "target": KINDS[figure].targets.get(engine),
            "is_met": self.is_met(engine, figure),
        }


def print_case(console: Console, result: CaseResult) -> None:
    """A line for each figure of each engine: median, ratio to the first engine, target, rounds."""
    table = Table(
        *("figure", "engine", "median", f"{result.ours} is", "target", "met", "rounds"),
        title=result.case.label,
    )
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for figure, kind in KINDS.items():
        for index, engine in enumerate(result.rounds):
            ratio = None if engine == result.ours else result.ratio(engine, figure)
            table.add_row(
                "" if index else kind.label,
                engine,
                f"{result.median(engine, figure):.4g}",
                "" if ratio is None else f"{ratio:.2f}x",
                result.target_text(engine, figure),
                {None: "", True: "yes", False: "[red]no[/]"}[result.is_met(engine, figure)],
                "  ".join(f"{value:.4g}" for value in result.rounds[engine][figure]),
                end_section=index == len(result.rounds) - 1,
            )
    console.print(table)


def summary_lines(results: Sequence[CaseResult]) -> list[str]:
    """How many targets are met, and which are not."""
    verdicts = [
        (f"{KINDS[figure].label.strip()} against {engine} ({result.case.label})", met)
        for result in results
        for figure in KINDS
        for engine in result.rounds
        if (met := result.is_met(engine, figure)) is not None
    ]
    missed = [text for text, met in verdicts if not met]
    return [f"{len(verdicts) - len(missed)} of {len(verdicts)} targets met"] + [
        f"  missed: {text}" for text in missed
    ]
