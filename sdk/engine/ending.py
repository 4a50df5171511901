"""Limits on an engine that fails or hangs while its worker ends."""

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable

from tandem.runtime.lifecycle import EXIT_IMPATIENT

logger = logging.getLogger(__name__)

_HANG_S = 5.0  # after the deadline, for an engine that blocks the event loop


class Watchdog:
    """A timer that ends the process when its engine hangs."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def start(self, deadline_s: float) -> None:
        """End the process some seconds after `deadline_s`, unless stopped. Idempotent."""
        if self._timer is None:
            self._timer = threading.Timer(deadline_s + _HANG_S, _exit)
            self._timer.daemon = True
            self._timer.start()

    def stop(self) -> None:
        """Let the process live."""
        if self._timer is not None:
            self._timer.cancel()


def _exit() -> None:
    logger.error("the engine hangs: exiting at once")
    os._exit(EXIT_IMPATIENT)


async def within(stage: str, ending: Awaitable[None], timeout_s: float | None) -> None:
    """Await one stage of an engine's end. Log its errors and a timeout; raise neither."""
    try:
        async with asyncio.timeout(timeout_s):
            await ending
    except TimeoutError:
        logger.warning("the engine's %s took longer than %.1f s", stage, timeout_s or 0.0)
    except Exception:
        logger.exception("the engine's %s failed", stage)
