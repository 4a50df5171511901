"""The same load under two settings, interleaved, and the ratios of their figures."""

import contextlib
import itertools
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.bench.client.openai import OpenAIClient
from tandem.bench.client.record import RequestRecord
from tandem.bench.client.wire import BodyBuilder
from tandem.bench.load.metrics import Summary, breakdown_ms
from tandem.bench.load.places import commonest, in_words, reason_lines, reasons_of
from tandem.bench.load.report import breakdown_tables, result_json, side_of, warnings
from tandem.bench.load.runs import Side
from tandem.bench.load.session import Run, Session

if TYPE_CHECKING:  # it imports every room's config, which only live settings need
    from tandem.bench.load.live_config import LiveConfig

PERCENTILES = ("p50", "p99")
LATENCIES = ("ttft", "ttst", "itl", "tpot", "e2el")
THROUGHPUTS = ("request_throughput", "output_token_throughput", "goodput")


@dataclass(frozen=True, slots=True)
class Leg:
    """One side of a comparison, and its finished rounds."""

    name: str  # A | B
    label: str
    url: str
    settings: Mapping[str, Any]
    runs: list[Run] = field(default_factory=list)

    @property
    def good(self) -> list[RequestRecord]:
        """The successful requests of all rounds."""
        records = [record for run in self.runs for record in run.result.records]
        return [record for record in records if record.succeeded]


@dataclass(frozen=True, slots=True)
class Row:
    """One metric of both sides, round by round."""

    metric: str
    a: tuple[float, ...]
    b: tuple[float, ...]

    @property
    def ratio(self) -> float | None:
        """Median of B over median of A; None when A's is zero."""
        below = statistics.median(self.a)
        return statistics.median(self.b) / below if below else None

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """B over A within each round."""
        return tuple(b / a if a else None for a, b in zip(self.a, self.b, strict=True))


def metrics_of(summary: Summary) -> dict[str, float]:
    """Return the figures of one run that are compared: latencies in ms, throughputs per second."""
    found = {
        f"{name} {mark}": getattr(summary.latencies_ms[name], mark)
        for name in LATENCIES
        if name in summary.latencies_ms
        for mark in PERCENTILES
    }
    for name in THROUGHPUTS:
        value = getattr(summary, name)
        if value is not None:
            found[name] = value
    return found


def compare_rounds(a: Sequence[Summary], b: Sequence[Summary]) -> list[Row]:
    """Return a row for every metric that all rounds of both sides have."""
    sides = [[metrics_of(summary) for summary in side] for side in (a, b)]
    if not sides[0] or not sides[1]:
        return []
    num_rounds = min(len(side) for side in sides)
    every = [found for side in sides for found in side[:num_rounds]]
    names = [name for name in every[0] if all(name in found for found in every)]
    return [
        Row(name, *(tuple(found[name] for found in side[:num_rounds]) for side in sides))
        for name in names
    ]


async def run_comparison(session: Session, console: Console) -> tuple[dict[str, Any], list[Side]]:
    """Run A B A B ..., print the ratios, put the settings back; return JSON and both sides."""
    options = session.options
    legs = _legs(session)
    async with contextlib.AsyncExitStack() as stack:
        live = await stack.enter_async_context(_live_config(session, legs))
        targets: dict[str, tuple[OpenAIClient, BodyBuilder]] = {}
        for leg in legs:
            client = session.client(leg.url)
            stack.callback(client.close)
            targets[leg.name] = client, await session.body(client)
        for index, leg in itertools.product(range(options.rounds), legs):
            if not session.interrupt.is_set:
                if live is not None:
                    await live.apply(leg.settings)
                await _run_leg(session, leg, *targets[leg.name], index)
    rows = compare_rounds(*([run.summary for run in leg.runs] for leg in legs))
    _print_rows(console, legs, rows)
    breakdowns = {leg.name: breakdown_ms(leg.good) for leg in legs}
    for table in breakdown_tables(breakdowns):
        console.print(table)
    _print_counts(console, legs)
    results = {
        "comparison": _rows_json(legs, rows) | {"breakdown_ms": msgspec.to_builtins(breakdowns)},
        "interrupted": session.interrupt.is_set,
        "rounds": {
            leg.name: [result_json(run, with_records=options.records) for run in leg.runs]
            for leg in legs
        },
    }
    return results, [
        side_of(f"{leg.name}: {leg.label}", leg.runs, session.plan, options.workers) for leg in legs
    ]


async def _run_leg(
    session: Session, leg: Leg, client: OpenAIClient, body: BodyBuilder, index: int
) -> None:
    if index == 0:
        await session.warm_up(client, body, label=leg.name)
    if session.interrupt.is_set:
        return
    label = f"{leg.name} {index + 1}/{session.options.rounds}"
    run = await session.measure(client, body, label=label, round_index=index)
    if not run.result.interrupted:
        leg.runs.append(run)


def _legs(session: Session) -> tuple[Leg, ...]:
    texts = session.options.compare or ("", "")
    urls = (session.options.url, session.options.compare_url or session.options.url)
    return tuple(
        Leg(name, text or url, url, _parse(text))
        for name, text, url in zip("AB", texts, urls, strict=True)
    )


def _parse(text: str) -> Mapping[str, Any]:
    if not text:
        return {}
    from tandem.bench.load.live_config import parse_settings

    return parse_settings(text)


@contextlib.asynccontextmanager
async def _live_config(session: Session, legs: Sequence[Leg]) -> AsyncIterator["LiveConfig | None"]:
    keys = {key for leg in legs for key in leg.settings}
    if not keys:
        yield None
        return
    from tandem.bench.load.live_config import LiveConfig, cluster_config

    named = session.options
    cluster = cluster_config(named.etcd_endpoints, named.namespace, named.nats_url, named.config)
    async with LiveConfig(cluster, keys) as live:
        yield live


def _print_rows(console: Console, legs: Sequence[Leg], rows: Sequence[Row]) -> None:
    for leg in legs:
        console.print(Text(f"{leg.name}: {leg.label}"), soft_wrap=True)
    if not rows:
        console.print(Text("no round of both sides was finished"), soft_wrap=True)
        return
    table = Table("median of rounds", "A", "B", "B/A", "B/A per round", title="comparison")
    for column in table.columns[1:4]:
        column.justify = "right"
    for row in rows:
        a, b = statistics.median(row.a), statistics.median(row.b)
        per_round = "  ".join(_ratio(ratio) for ratio in row.ratios)
        table.add_row(row.metric, f"{a:.4g}", f"{b:.4g}", _ratio(row.ratio), per_round)
    console.print(table)
    console.print(
        Text("latencies in ms (below 1 is better), throughputs per second"), soft_wrap=True
    )


def _print_counts(console: Console, legs: Sequence[Leg]) -> None:
    for leg in legs:
        for index, run in enumerate(leg.runs):
            summary = run.summary
            errors = ", ".join(f"{n} x {kind}" for kind, n in summary.errors.items())
            parts = [f"{summary.num_succeeded} of {summary.num_requests} succeeded"]
            places = summary.prefill_places
            parts += [f"prefill {in_words(places)}"] if places else []
            parts += [f"errors: {errors}"] if errors else []
            parts += warnings(summary, run.result)
            console.print(Text(f"{leg.name} round {index + 1}: {'; '.join(parts)}"), soft_wrap=True)
        for line in reason_lines(commonest(reasons_of(leg.good))):
            console.print(Text(line), soft_wrap=True)


def _rows_json(legs: Sequence[Leg], rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "legs": {leg.name: {"label": leg.label, "url": leg.url} for leg in legs},
        "metrics": {
            row.metric: {"a": row.a, "b": row.b, "ratio": row.ratio, "ratios": row.ratios}
            for row in rows
        },
    }


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"
