"""An idle worker asks itself now and then, and hides from others while it does not answer."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

CANARY_INTERVAL_S = 10.0  # without any request, before the worker is asked
CANARY_TIMEOUT_S = 5.0


class Canary:
    """Runs `ask` after every interval in which `num_requests` stood still.

    `on_change` hears False when `ask` raised or took too long, True when it went well again.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[None]],
        num_requests: Callable[[], int],
        on_change: Callable[[bool], Awaitable[None]],
        *,
        interval_s: float = CANARY_INTERVAL_S,
        timeout_s: float = CANARY_TIMEOUT_S,
    ) -> None:
        self._ask = ask
        self._num_requests = num_requests
        self._on_change = on_change
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self.is_healthy = True

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            num_before = self._num_requests()
            await asyncio.sleep(self._interval_s)
            if self._num_requests() == num_before or not self.is_healthy:
                await self._look()

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._ask()
            is_healthy = True
        except Exception as error:  # whatever the author's handler raises
            logger.log(
                logging.WARNING if self.is_healthy else logging.DEBUG,
                "the health check failed: %r",
                error,
            )
            is_healthy = False
        if is_healthy != self.is_healthy:
            self.is_healthy = is_healthy
            await self._on_change(is_healthy)
