"""Progress of a long run on stderr: a bar on a terminal, a plain line now and then elsewhere."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tandem.bench.load.load import LoadPlan, LoadRun

REFRESH_S = 0.25
LINE_INTERVAL_S = 5.0


@contextlib.asynccontextmanager
async def shown(run: LoadRun, plan: LoadPlan, label: str, total: int | None) -> AsyncIterator[None]:
    """Show a run's progress while the body runs. `total` requests, where that is known."""
    task = asyncio.create_task(
        _bar(run, plan, label, total) if sys.stderr.isatty() else _lines(run, label, total)
    )
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def share_done(run: LoadRun, plan: LoadPlan, total: int | None) -> float | None:
    """Return the share of a run that is over, 0 to 1; None if it is unknown."""
    shares = []
    if total:
        shares.append(run.num_finished / total)
    if plan.duration_s:
        shares.append(run.elapsed_s / plan.duration_s)
    return min(max(shares), 1.0) if shares else None


async def _bar(run: LoadRun, plan: LoadPlan, label: str, total: int | None) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    text = TextColumn("{task.fields[counts]}")
    with Progress(*columns, text, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(label, total=1.0, counts="")
        while True:
            share = share_done(run, plan, total)
            progress.update(bar, completed=share, total=None if share is None else 1.0)
            progress.update(bar, counts=_counts(run, total))
            await asyncio.sleep(REFRESH_S)


async def _lines(run: LoadRun, label: str, total: int | None) -> None:
    console = Console(stderr=True, highlight=False)
    started_s = perf_counter()
    while True:
        await asyncio.sleep(LINE_INTERVAL_S)
        console.print(f"{label}: {perf_counter() - started_s:.0f} s, {_counts(run, total)}")


def _counts(run: LoadRun, total: int | None) -> str:
    of_total = f"/{total}" if total else ""
    failed = f", {run.num_failed} failed" if run.num_failed else ""
    return f"{run.num_finished}{of_total} done, {run.num_in_flight} in flight{failed}"
