"""Changes of a state, which are reported to others."""

import asyncio
from collections.abc import AsyncIterator

from tandem.runtime.tasks import ends_within

LEAST_OFTEN_S = 1.0


class Changes:
    """Notes of changes, from any thread, for one task of the event loop that reports the state."""

    def __init__(self) -> None:
        self._is_due = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # of the task

    def note(self) -> None:
        """Request a report. No effect before the first report, which has the change in it."""
        loop = self._loop
        if loop is not None and not self._is_due.is_set() and not loop.is_closed():
            loop.call_soon_threadsafe(self._is_due.set)

    async def reports(self, pause_s: float) -> AsyncIterator[None]:
        """Yield when a report is due: now, after each change, and at least once a second.

        Two reports are `pause_s` or more apart.
        """
        self._loop = asyncio.get_running_loop()
        while True:
            self._is_due.clear()
            yield
            await asyncio.sleep(pause_s)
            await ends_within(self._is_due.wait(), LEAST_OFTEN_S)
