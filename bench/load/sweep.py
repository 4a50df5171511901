"""The same load at several rates or concurrencies, one after another."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.bench.load.load import LoadPlan
from tandem.bench.load.places import reason_lines, share_remote
from tandem.bench.load.report import result_json, short, side_of
from tandem.bench.load.runs import Side
from tandem.bench.load.session import Run, Session
from tandem.bench.load.sides import metrics_of

# metric |-> heading
COLUMNS = {
    "request_throughput": "req/s",
    "goodput": "good/s",
    "output_token_throughput": "out tok/s",
    "ttft p50": "TTFT p50",
    "ttft p99": "p99",
    "itl p50": "ITL p50",
    "itl p99": "p99",
}


async def run_sweep(session: Session, console: Console) -> tuple[dict[str, Any], list[Side]]:
    """Measure every load, print a line for each; return JSON and a side per load."""
    options = session.options
    plans = options.sweep_plans()
    found: list[tuple[str, LoadPlan, Run]] = []
    client = session.client(options.url)
    try:
        body = await session.body(client)
        await session.warm_up(client, body)
        for index, plan in enumerate(plans):
            if session.interrupt.is_set:
                break
            label = label_of(plan)
            run = await session.measure(client, body, label=label, round_index=index, plan=plan)
            found.append((label, plan, run))
    finally:
        client.close()
    title = f"{body.model} at {options.url}"
    console.print(_table(title, found))
    for label, _, run in found:
        if run.summary.prefill_reasons:
            console.print(Text(f"prefill at {label}:"), soft_wrap=True)
        for line in reason_lines(run.summary.prefill_reasons):
            console.print(Text(line), soft_wrap=True)
    points = [
        {
            "label": label,
            "request_rate": plan.request_rate,
            "concurrency": plan.concurrency,
            **result_json(run, with_records=options.records),
        }
        for label, plan, run in found
    ]
    results = {"title": title, "interrupted": session.interrupt.is_set, "sweep": points}
    return results, [
        side_of(label, [run], plan, options.workers, curve="") for label, plan, run in found
    ]


def label_of(plan: LoadPlan) -> str:
    """Return the load of one point in words."""
    if plan.request_rate is not None:
        return f"{plan.request_rate:g} requests/s"
    return f"{plan.concurrency} at once"


def _table(title: str, found: Sequence[tuple[str, LoadPlan, Run]]) -> Table:
    table = Table("load", *COLUMNS.values(), "remote", title=title)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for label, _, run in found:
        values = metrics_of(run.summary)
        cells = [short(values[metric]) if metric in values else "-" for metric in COLUMNS]
        places = run.summary.prefill_places
        table.add_row(label, *cells, f"{share_remote(places):.0%}" if places else "-")
    return table
