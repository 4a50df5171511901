"""The ratios of contenders to the better unsplit workers, as figures and as a table. Pure."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tandem.bench.load.metrics import Summary, summarize
from tandem.bench.load.places import commonest, share_remote
from tandem.bench.load.session import Run
from tandem.bench.load.sides import metrics_of
from tandem.bench.report.figures import Figure, Target, at_least
from tandem.emulation.profile import MAX_LATE_SHARE

UNSPLIT = "unsplit"
ROUND_ROBIN = "unsplit-round-robin"
BASELINES = (UNSPLIT, ROUND_ROBIN)
PROMISE = at_least(0.97)

Values = dict[str, float]  # of one run, by the names of metrics
Results = dict[str, dict[str, list[Values]]]  # cell |-> contender |-> one per round
Reasons = dict[str, Counter[str]]  # contender |-> of the places of its prompts, over all cells


@dataclass(frozen=True, slots=True)
class Metric:
    """A value that is compared: a rate, or a time."""

    name: str
    title: str
    is_rate: bool = False
    target: Target | None = None

    def ratio(self, ours: Values, unsplit: Values) -> float | None:
        """Return how many times as good ours is; None where there is nothing to divide."""
        if self.name not in ours or self.name not in unsplit:
            return None
        pair = (ours[self.name], unsplit[self.name])
        above, below = pair if self.is_rate else reversed(pair)
        return above / below if below else None

    def goodness(self, rounds: Sequence[Values]) -> float:
        """Return a number that is higher for better rounds: of their median."""
        found = [values[self.name] for values in rounds if self.name in values]
        if not found:
            return -math.inf
        return statistics.median(found) * (1 if self.is_rate else -1)


METRICS = (
    Metric("request_throughput", "requests/s", is_rate=True, target=PROMISE),
    Metric("e2el p50", "end to end p50", target=PROMISE),
    Metric("ttft p50", "TTFT p50", target=PROMISE),
    Metric("ttft p99", "TTFT p99", target=PROMISE),
    Metric("itl p99", "ITL p99"),
    Metric("goodput tight", "goodput, tight", is_rate=True),
    Metric("goodput loose", "goodput, loose", is_rate=True),
)


def values_of(run: Run, targets: Mapping[str, Mapping[str, float]]) -> Values:
    """Return the values of a run: those compared, and its counts; `targets` are limits in ms."""
    summary = run.summary
    goodputs = {
        f"goodput {name}": summarize(run.result.records, slos).goodput or 0.0
        for name, slos in targets.items()
    }
    return {
        **metrics_of(summary),
        **goodputs,
        "num_requests": summary.num_requests,
        "num_failed": num_failed(summary),
        "remote_share": share_remote(summary.prefill_places),
    }


def num_failed(summary: Summary) -> int:
    """Return the requests with an error or with a shorter answer than asked for."""
    return summary.num_requests - summary.num_succeeded + summary.num_short_answers


def is_late(values: Values) -> bool:
    """Return True for a run whose emulated steps were too late to be those of the device."""
    return values.get("late_share", 0.0) > MAX_LATE_SHARE


def figures_of(results: Results) -> Iterator[Figure]:
    """Yield the ratio of each contender, metric and cell; a sample is the ratio within a round.

    The unsplit workers of a ratio are those with the better median of the metric in the cell; those
    that are chosen in turn have ratios to the others, without a target. A round with a run that was
    too late is left out.
    """
    for cell, rounds in results.items():
        for contender in rounds:
            if contender == UNSPLIT:
                continue
            for metric in METRICS:
                baseline = _baseline(contender, rounds, metric)
                pairs = zip(rounds[contender], rounds.get(baseline, ()), strict=False)
                kept = [pair for pair in pairs if not any(map(is_late, pair))]
                found = [metric.ratio(*pair) for pair in kept]
                samples = tuple(ratio for ratio in found if ratio is not None)
                if samples:
                    label = f"{cell}: {metric.title}, {contender} against {baseline}"
                    target = None if contender == ROUND_ROBIN else metric.target
                    name = _name(cell, contender, metric)
                    yield Figure(name, label, "x", samples, target)


def _baseline(contender: str, rounds: Mapping[str, list[Values]], metric: Metric) -> str:
    if contender == ROUND_ROBIN:
        return UNSPLIT
    measured = [name for name in BASELINES if name in rounds]
    return max(measured, key=lambda name: metric.goodness(rounds[name]), default=UNSPLIT)


def markdown(results: Results, reasons: Reasons) -> str:
    """Return a table for each contender: medians of the rounds' ratios, least and greatest.

    Its last row is over the rounds of all cells, for the metrics with a target. Below it stand
    the commonest reasons for the places of its prompts.
    """
    figures = {figure.name: figure for figure in figures_of(results)}
    contenders = dict.fromkeys(name for rounds in results.values() for name in rounds)
    return "\n".join(
        line
        for contender in contenders
        if contender != UNSPLIT
        for line in _table(contender, results, figures, reasons.get(contender, Counter()))
    )


def _table(
    contender: str, results: Results, figures: Mapping[str, Figure], reasons: Counter[str]
) -> Iterator[str]:
    names = [name for name in BASELINES if name != contender]
    rates_of = [f"{name}, requests/s" for name in names]
    titles = ["cell", *rates_of, *(metric.title for metric in METRICS), "remote"]
    whom = "unsplit" if contender == ROUND_ROBIN else "the better unsplit"
    yield f"**{contender}** against {whom}:\n"
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    shown = {cell: rounds for cell, rounds in results.items() if rounds.get(contender)}
    judged: list[Figure] = []
    for cell, rounds in shown.items():
        found = [figures.get(_name(cell, contender, metric)) for metric in METRICS]
        row = [cell, *(_rate(rounds.get(name, ())) for name in names), *map(_text, found)]
        remote = statistics.median(values["remote_share"] for values in rounds[contender])
        yield f"| {' | '.join(row)} | {remote:.0%} |"
        judged += [figure for figure in found if figure is not None and figure.target]
    means = [_mean([each for each in judged if each.name.endswith(m.name)]) for m in METRICS]
    yield f"| geometric mean, standard error |{' |' * len(names)} {' | '.join(means)} | |"
    yield ""
    if judged:
        num_met = sum(figure.verdict == "met" for figure in judged)
        yield f"{num_met} of {len(judged)} medians with a target reach it ({PROMISE.text()})."
    failed = {
        f"{cell}, {name}": sum(values["num_failed"] for values in rounds.get(name, ()))
        for cell, rounds in shown.items()
        for name in (*names, contender)
    }
    runs = [
        run for each in shown.values() for name in (*names, contender) for run in each.get(name, ())
    ]
    if num_late := sum(map(is_late, runs)):
        yield f"Runs with emulated steps later than {MAX_LATE_SHARE:.0%}, not judged: {num_late}."
    if any(failed.values()):
        counts = "; ".join(f"{where}: {count:.0f}" for where, count in failed.items() if count)
        yield f"Failed or short answers: {counts}."
    if reasons:
        counts = "; ".join(f"{count} x {why}" for why, count in commonest(reasons).items())
        yield f"Places of its prompts, the commonest: {counts}."
    yield ""


def _mean(figures: list[Figure]) -> str:
    """Return the geometric mean of all ratios, and its standard error."""
    logs = [math.log(sample) for figure in figures for sample in figure.samples]
    if len(logs) < 2:
        return "-"
    mean, error = math.exp(statistics.fmean(logs)), statistics.stdev(logs) / math.sqrt(len(logs))
    return f"{mean:.2f} ± {mean * error:.2f}"


def _text(figure: Figure | None) -> str:
    if figure is None or figure.value is None:
        return "-"
    return f"{figure.value:.2f} ({min(figure.samples):.2f} to {max(figure.samples):.2f})"


def _rate(rounds: Sequence[Values]) -> str:
    rates = [values["request_throughput"] for values in rounds]
    return f"{statistics.median(rates):.2f}" if rates else "-"


def _name(cell: str, contender: str, metric: Metric) -> str:
    return f"{cell}/{contender}/{metric.name}"
