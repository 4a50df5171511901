"""The figures of simulated layouts, the best of them, and how they are shown."""

from collections.abc import Sequence

import msgspec
from rich.table import Table

from tandem.bench.load.metrics import Summary
from tandem.bench.load.places import share_remote
from tandem.launch.simulation.cluster import Outcome

# Layouts within this share of the most goodput serve as much: the faster one of them is better.
EQUAL_SHARE = 0.01


class LayoutFigures(msgspec.Struct, frozen=True):
    """One layout under the load. Latencies are in ms, as `tandem bench` defines them."""

    name: str
    requests_per_s: float
    goodput_per_s: float | None  # of requests within the targets; None without targets
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    e2el_mean_ms: float
    utilization: list[float]  # of each worker
    share_remote: float  # of the prompts
    reasons: dict[str, int]  # the commonest ones, for the places of prompts

    @property
    def rate(self) -> float:
        """The requests per second that count."""
        return self.requests_per_s if self.goodput_per_s is None else self.goodput_per_s


def figures_of(outcome: Outcome, summary: Summary) -> LayoutFigures:
    """Return the figures of a run that has requests; `summary` is that of its records."""
    ttft, itl = summary.latencies_ms["ttft"], summary.latencies_ms.get("itl")
    return LayoutFigures(
        name=outcome.layout.name,
        requests_per_s=summary.request_throughput,
        goodput_per_s=summary.goodput,
        ttft_p50_ms=ttft.p50,
        ttft_p99_ms=ttft.p99,
        itl_p50_ms=itl.p50 if itl else 0.0,
        itl_p99_ms=itl.p99 if itl else 0.0,
        e2el_mean_ms=summary.latencies_ms["e2el"].mean,
        utilization=[busy_s / summary.duration_s for busy_s in outcome.busy_s],
        share_remote=share_remote(summary.prefill_places),
        reasons=summary.prefill_reasons,
    )


def best_of(layouts: Sequence[LayoutFigures]) -> LayoutFigures:
    """Return the layout with the most goodput, or requests/s without targets.

    Among those that are as good within a percent it is the one with the shortest answers' time.
    """
    most = max(layout.rate for layout in layouts)
    equal = [layout for layout in layouts if layout.rate >= most * (1 - EQUAL_SHARE)]
    return min(equal, key=lambda layout: layout.e2el_mean_ms)


def table_of(layouts: Sequence[LayoutFigures], title: str) -> Table:
    """Return the layouts side by side, the best one marked."""
    best = best_of(layouts)
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    table.add_column("layout")
    for heading in ("req/s", "goodput/s", "TTFT p50", "p99", "ITL p50", "p99 ms", "busy", "remote"):
        table.add_column(heading, justify="right")
    for each in layouts:
        goodput = "-" if each.goodput_per_s is None else f"{each.goodput_per_s:.3g}"
        latencies = (each.ttft_p50_ms, each.ttft_p99_ms, each.itl_p50_ms, each.itl_p99_ms)
        table.add_row(
            each.name + (" *" if each is best else ""),
            f"{each.requests_per_s:.3g}",
            goodput,
            *(f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" for ms in latencies),
            _shares(each.utilization),
            f"{each.share_remote:.0%}",
        )
    return table


def _shares(utilization: Sequence[float]) -> str:
    """Return the least and the most busy worker's share of the time."""
    low, high = min(utilization), max(utilization)
    return f"{low:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%}-{high:.0%}"
