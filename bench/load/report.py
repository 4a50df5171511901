"""A run's figures as a table for people and as JSON for programs."""

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.bench.load.breakdown import breakdown_tables, short
from tandem.bench.load.load import LoadResult
from tandem.bench.load.metrics import DEFINITIONS, RequestRecord, Summary
from tandem.bench.load.session import Measurement

SCHEMA_VERSION = 1
BUSY_CLIENT_SHARE = 0.7  # of one core; above it the client may be what is measured

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


def print_summary(
    console: Console, title: str, measurement: Measurement, slos: Mapping[str, float]
) -> None:
    """The table of percentiles, what was counted, and everything that went wrong."""
    summary, result = measurement.summary, measurement.result
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
    """What every figure means."""
    console.print(Text("Definitions", style="bold"), soft_wrap=True)
    for name, meaning in DEFINITIONS.items():
        console.print(Text.assemble((f"  {name}: ", "bold dim"), (meaning, "dim")), soft_wrap=True)


def warnings(summary: Summary, result: LoadResult) -> list[str]:
    """What a reader must know before believing the figures."""
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


def write_document(
    output: Path | None,
    module: str,
    settings: Mapping[str, Any],
    started_at: datetime,
    results: Mapping[str, Any],
) -> None:
    """The document of `python -m module`, as JSON; nothing where there is no `output`."""
    if output is not None:
        command = ["python", "-m", module]
        whole = document(command=command, settings=settings, started_at=started_at, results=results)
        output.write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n")


def document(
    *,
    command: Sequence[str],
    settings: Mapping[str, Any],
    started_at: datetime,
    results: Mapping[str, Any],
) -> dict[str, Any]:
    """The JSON document around a run's results."""
    return {
        "schema_version": SCHEMA_VERSION,
        "started_at": started_at.isoformat(timespec="seconds"),
        "command": list(command),
        "settings": dict(settings),
        "environment": environment(),
        "definitions": dict(DEFINITIONS),
        **results,
    }


def result_json(measurement: Measurement, *, with_records: bool) -> dict[str, Any]:
    """One run for the JSON document; latencies in ms, times of records in seconds."""
    summary, result = measurement.summary, measurement.result
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


def environment() -> dict[str, Any]:
    """The machine and the software a run was made on."""
    try:
        tandem_version = version("tandem-serve")
    except PackageNotFoundError:
        tandem_version = "unknown"
    return {
        "tandem": tandem_version,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "num_usable_cpus": len(os.sched_getaffinity(0)) if sys.platform == "linux" else None,
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": os.getloadavg(),
    }


def utc_now() -> datetime:
    return datetime.now(UTC)


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
        places = ", ".join(f"{count} {place}" for place, count in summary.prefill_places.items())
        lines.append(f"prefill     {places}")
    if summary.num_fallbacks:
        lines.append(f"handoffs    {summary.num_fallbacks} were given up, and prefilled locally")
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


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            names = (line.partition(":")[2] for line in info if line.startswith("model name"))
            return next(names, platform.processor()).strip()
    except OSError:
        return platform.processor()
