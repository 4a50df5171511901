"""The end of an engine's worker: its time, and limits on an engine that fails or hangs in it."""

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable
from dataclasses import dataclass

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError
from tandem.runtime.process.lifecycle import EXIT_IMPATIENT

logger = logging.getLogger(__name__)

_GRACE_VARIABLES = ("TANDEM_SHUTDOWN_GRACE_S", "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS")
_TRANSFER_VARIABLES = ("TANDEM_PREFILL_DRAIN_TIMEOUT_S", "DYN_PREFILL_DRAIN_TIMEOUT_S")
_HANG_S = 5.0  # after the deadline, for an engine that blocks the event loop


@dataclass(frozen=True, slots=True)
class ShutdownBudget:
    """The stages between the signal and the end; seconds.

    `total_s` is the whole time. Time that one stage leaves goes to the next. Cleanup always has
    `cleanup_s`, even when no time is left.
    """

    total_s: float
    grace_s: float
    transfer_s: float
    cleanup_s: float

    @classmethod
    def of(cls, config: RuntimeConfig) -> "ShutdownBudget":
        """Divide `runtime.drain_timeout_s`; the environment may set grace and transfer."""
        total_s = config.drain_timeout_s
        return cls(
            total_s=total_s,
            grace_s=min(_seconds(_GRACE_VARIABLES, 0.25), total_s / 4),
            transfer_s=min(_seconds(_TRANSFER_VARIABLES, 30.0), total_s / 4),
            cleanup_s=min(5.0, total_s / 4),
        )


def _seconds(variables: tuple[str, ...], default: float) -> float:
    name = next((name for name in variables if os.environ.get(name)), None)
    if name is None:
        return default
    try:
        value = float(os.environ[name])
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise ConfigError(f"environment variable {name}: not a number of seconds", param=name)
    return value


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
