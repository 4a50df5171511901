"""Health checks of an idle worker, which leaves discovery while they fail."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Self

from tandem.runtime.tasks import cancel, keep_running

logger = logging.getLogger(__name__)

CANARY_INTERVAL_S = 10.0  # without any request, before a check
CANARY_TIMEOUT_S = 5.0


class Canary:
    """Runs `ask` after every interval in which `num_requests` did not change, in `async with`.

    `on_change` is called with False when `ask` raised or took too long, with True when it succeeds
    again.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[None]],
        num_requests: Callable[[], int],
        on_change: Callable[[bool], Awaitable[None]],
        interval_s: float,
    ) -> None:
        self._ask = ask
        self._num_requests = num_requests
        self._on_change = on_change
        self._interval_s = interval_s
        self.is_healthy = True
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watching = keep_running("the health check", self._watch)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop checking. Idempotent."""
        await cancel(self._watching)

    async def _watch(self) -> None:
        while True:
            num_before = self._num_requests()
            await asyncio.sleep(self._interval_s)
            if self._num_requests() == num_before or not self.is_healthy:
                await self._check()

    async def _check(self) -> None:
        try:
            async with asyncio.timeout(CANARY_TIMEOUT_S):
                await self._ask()
            is_healthy = True
        except Exception as error:  # the author's handler may raise anything
            logger.log(
                logging.WARNING if self.is_healthy else logging.DEBUG,
                "the health check failed: %r",
                error,
            )
            is_healthy = False
        if is_healthy != self.is_healthy:
            self.is_healthy = is_healthy
            await self._on_change(is_healthy)
