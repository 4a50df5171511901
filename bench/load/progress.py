"""Progress of measured runs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tandem.bench.load.load import LoadPlan, LoadRun
from tandem.runtime.progress import ProgressBar

REFRESH_S = 0.25


@contextlib.asynccontextmanager
async def shown(
    bar: ProgressBar, num_before: int, run: LoadRun, plan: LoadPlan, label: str, total: int | None
) -> AsyncIterator[None]:
    """Show a run, after `num_before` others, while the body runs.

    `total` requests, where that is known.
    """
    with bar:
        task = asyncio.create_task(_refresh(bar, num_before, run, plan, label, total))
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def share_done(run: LoadRun, plan: LoadPlan, total: int | None) -> float:
    """Return the share of a run that is over, 0 to 1; 0 if it is unknown."""
    shares = [0.0]
    if total:
        shares.append(run.num_finished / total)
    if plan.duration_s:
        shares.append(run.elapsed_s / plan.duration_s)
    return min(max(shares), 1.0)


async def _refresh(
    bar: ProgressBar, num_before: int, run: LoadRun, plan: LoadPlan, label: str, total: int | None
) -> None:
    while True:
        share = share_done(run, plan, total)
        bar.update(num_before + share, f"{label}: {_counts(run, total)}")
        await asyncio.sleep(REFRESH_S)


def _counts(run: LoadRun, total: int | None) -> str:
    of_total = f"/{total}" if total else ""
    failed = f", {run.num_failed} failed" if run.num_failed else ""
    return f"{run.num_finished}{of_total} done, {run.num_in_flight} in flight{failed}"
