"""The figures of one run of `tandem bench`, as tables for people and as JSON for programs."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.bench.client.record import RequestRecord
from tandem.bench.load.load import LoadPlan, LoadResult
from tandem.bench.load.metrics import DEFINITIONS, Distribution, Summary
from tandem.bench.load.places import in_words, reason_lines
from tandem.bench.load.runs import RunFigures, Side
from tandem.bench.load.session import Run

Breakdown = Mapping[str, Mapping[str, Distribution]]  # course |-> part |-> ms

TITLES: Mapping[str, str] = {"remote": "prefilled remotely", "local": "prefilled locally"}
PARTS: Mapping[str, Mapping[str, str]] = {
    "remote": {
        "ttft": "time to first token",
        "outside": "  outside the decode worker",
        "placement": "  placed, and put on the queue",
        "queue": "  waited for a prefill worker",
        "prefix_pull": "  prefix pulled",
        "compute": "  computed",
        "answer": "  first token brought back",
        "ttst": "time to second token: as above until computed, then",
        "exposed_transfer": "  exposed transfer",
        "verification": "  verification",
        "first_step": "  first step",
    },
    "local": {
        "ttft": "time to first token",
        "outside": "  outside the decode worker",
        "prefill": "  waited and computed",
        "ttst": "time to second token: as above, then",
        "second_token": "  first step",
    },
}
BUSY_CLIENT_SHARE = 0.7  # of one core; above it the client may be the bottleneck

ROWS: Mapping[str, str] = {
    "ttft": "time to first token",
    "ttft_local": "  prefilled locally",
    "ttft_remote": "  prefilled remotely",
    "ttst": "time to second token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2el": "end to end",
    "ttft_from_sent": "first token, from sent",
    "e2el_from_sent": "end to end, from sent",
    "send_delay": "scheduled to sent",
}


def print_summary(console: Console, title: str, run: Run, slos: Mapping[str, float]) -> None:
    """Print the table of percentiles, the counts and the errors."""
    summary, result = run.summary, run.result
    table = Table("ms", *("mean", "p50", "p90", "p95", "p99", "max"), title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, label in ROWS.items():
        spread = summary.latencies_ms.get(name)
        if spread is not None:
            marks = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.max)
            table.add_row(label, *(short(mark) for mark in marks))
    if table.row_count:
        console.print(table)
    for part in breakdown_tables({"": summary.breakdown_ms}):
        console.print(part)
    for line in _lines(summary, result, slos):
        console.print(Text(line), soft_wrap=True)


def print_definitions(console: Console) -> None:
    """Print the definition of every figure."""
    console.print(Text("Definitions", style="bold"), soft_wrap=True)
    for name, meaning in DEFINITIONS.items():
        console.print(Text.assemble((f"  {name}: ", "bold dim"), (meaning, "dim")), soft_wrap=True)


def warnings(summary: Summary, result: LoadResult) -> list[str]:
    """Return the doubts that a reader must know of."""
    found: list[str] = []
    if result.interrupted:
        found.append(
            f"interrupted: {summary.num_unfinished} requests were cut off and enter no figure"
        )
    share = result.client_cpu_s / result.wall_s if result.wall_s else 0.0
    if share > BUSY_CLIENT_SHARE:
        found.append(f"the load generator used {share:.0%} of a core and may be the bottleneck")
    if summary.num_short_answers:
        found.append(
            f"{summary.num_short_answers} answers were shorter than asked: the server ignored "
            "ignore_eos, or a limit cut them"
        )
    if summary.num_without_usage:
        found.append(
            f"{summary.num_without_usage} answers came without usage: their output tokens are "
            "counted as output events, their input tokens not at all"
        )
    per_event = summary.tokens_per_output_event
    if per_event is not None and per_event > 1.05:
        found.append(
            f"{per_event:.2f} tokens per output event: itl is the gap between events, "
            "tpot is per token"
        )
    return found


def result_json(run: Run, *, with_records: bool) -> dict[str, Any]:
    """Return one run for the JSON document; latencies in ms, times of records in seconds."""
    summary, result = run.summary, run.result
    body: dict[str, Any] = {
        "summary": msgspec.to_builtins(summary),
        "warnings": warnings(summary, result),
        "interrupted": result.interrupted,
        "client_cpu_s": result.client_cpu_s,
        "num_reconnects": result.num_reconnects,
    }
    if with_records:
        body["requests"] = [msgspec.to_builtins(record) for record in result.records]
    return body


def side_of(
    label: str, runs: Sequence[Run], plan: LoadPlan, num_workers: int, curve: str | None = None
) -> Side:
    """Return the finished runs of one label for a picture; `curve` names the sweep of a point."""
    rounds = [
        RunFigures(run.summary, run.result.records, warnings(run.summary, run.result))
        for run in runs
    ]
    return Side(label, rounds, plan.request_rate, num_workers, curve)


def _lines(summary: Summary, result: LoadResult, slos: Mapping[str, float]) -> list[str]:
    lines = [
        f"requests    {summary.num_succeeded} of {summary.num_requests} succeeded in "
        f"{summary.duration_s:.2f} s: {summary.request_throughput:.2f} requests/s",
        f"tokens      in {summary.num_input_tokens} ({summary.num_cached_tokens} cached, "
        f"{summary.input_token_throughput:.1f}/s), out {summary.num_output_tokens} "
        f"({summary.output_token_throughput:.1f}/s)",
    ]
    if summary.goodput is not None and summary.goodput_share is not None:
        limits = " ".join(f"{name}:{limit:g}" for name, limit in slos.items())
        lines.append(
            f"goodput     {summary.goodput:.2f} requests/s ({summary.goodput_share:.1%}) "
            f"within {limits} ms"
        )
    if summary.prefill_places:
        lines.append(f"prefill     {in_words(summary.prefill_places)}")
        lines += reason_lines(summary.prefill_reasons)
    if summary.num_fallbacks:
        lines.append(f"handoffs    {summary.num_fallbacks} given up, and prefilled locally")
    if errors := summary.prediction:
        lines.append(
            f"prediction  of {errors.num_samples} first tokens: median error {errors.median:.1%}, "
            f"{errors.share_within_half:.1%} within 50 %"
        )
    lines.append(
        f"client      {result.client_cpu_s / max(result.wall_s, 1e-9):.0%} of a core, "
        f"{result.num_reconnects} reconnects"
    )
    for kind, count in summary.errors.items():
        lines.append(f"error       {count} x {kind}{_example(kind, result.records)}")
    return lines + [f"warning     {text}" for text in warnings(summary, result)]


def _example(kind: str, records: Sequence[RequestRecord]) -> str:
    first = next(record for record in records if record.error == kind)
    return f", the first: {first.error_message}" if first.error_message else ""


def breakdown_tables(sides: Mapping[str, Breakdown]) -> list[Table]:
    """Return a table for each course that any side has, with the sides beside each other."""
    return [
        _part_table(course, {name: side.get(course, {}) for name, side in sides.items()})
        for course in PARTS
        if any(course in side for side in sides.values())
    ]


def _part_table(course: str, sides: Mapping[str, Mapping[str, Distribution]]) -> Table:
    num_requests = ", ".join(
        f"{name} {max(spread.num_samples for spread in side.values()) if side else 0}".strip()
        for name, side in sides.items()
    )
    marks = [f"{name} {mark}".strip() for name in sides for mark in ("p50", "p99")]
    table = Table("ms", *marks, title=f"{TITLES[course]} ({num_requests} requests)")
    for column in table.columns[1:]:
        column.justify = "right"
    for part, label in PARTS[course].items():
        spreads = [side.get(part) for side in sides.values()]
        if any(spreads):
            table.add_row(label, *(cell for spread in spreads for cell in _cells(spread)))
    return table


def _cells(spread: Distribution | None) -> tuple[str, str]:
    return ("-", "-") if spread is None else (short(spread.p50), short(spread.p99))


def short(value: float) -> str:
    """Return a figure in four digits or so."""
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 1000 else f"{value:.0f}"
