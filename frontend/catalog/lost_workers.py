"""A connection to each worker, and the workers that are lost until they answer on a new one."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ConnectionLostError, TandemError
from tandem.runtime.plane.client import RequestClient

logger = logging.getLogger(__name__)

_PAUSE_S = 0.2  # between attempts to reach a worker


class LostWorkers:
    """The addresses that no request goes to, because their connection was lost.

    Each worker has a connection before its first request, so one that dies is noticed at once, not
    when its lease ends. A lost one is dialed again and again while `is_worker(address)`. A dead
    worker never answers, and leaves discovery; one that stood still, or whose network was away,
    answers and is as it was.
    """

    def __init__(
        self,
        client: RequestClient,
        is_worker: Callable[[str], bool],
        on_change: Callable[[], None],
    ) -> None:
        self._client = client
        self._is_worker = is_worker
        self._on_change = on_change
        self._attempts: dict[str, asyncio.Task[None]] = {}  # by address
        self._connected: set[str] = set()  # dialed once
        self._dials: set[asyncio.Task[None]] = set()  # of these, under way
        self._stop_listening = client.on_loss(self._on_loss)

    def __len__(self) -> int:
        return len(self._attempts)

    def __contains__(self, address: str) -> bool:
        return address in self._attempts

    def connect(self, addresses: set[str]) -> None:
        """Dial those of the present workers that are new."""
        loop = asyncio.get_running_loop()
        for address in addresses - self._connected:
            dial = loop.create_task(self._dial(address))
            self._dials.add(dial)
            dial.add_done_callback(self._dials.discard)
        self._connected = addresses

    async def close(self) -> None:
        """End the attempts to reach them."""
        self._stop_listening()
        attempts = [*self._dials, *self._attempts.values()]
        for attempt in attempts:
            attempt.cancel()
        await asyncio.gather(*attempts, return_exceptions=True)

    def _on_loss(self, address: str) -> None:
        if address not in self._attempts and self._is_worker(address):
            logger.warning("the worker at %s gets no requests until it answers", address)
            self._attempts[address] = asyncio.get_running_loop().create_task(self._reach(address))
            self._on_change()

    async def _dial(self, address: str) -> None:
        with contextlib.suppress(TandemError):  # `_on_loss` is called, or requests will fail by it
            await self._client.reach(address, RequestContext())

    async def _reach(self, address: str) -> None:
        try:
            while self._is_worker(address) and not await self._answers(address):
                await asyncio.sleep(_PAUSE_S)
        finally:
            del self._attempts[address]
        self._on_change()

    async def _answers(self, address: str) -> bool:
        try:
            await self._client.reach(address, RequestContext())
        except ConnectionLostError:
            return False
        except TandemError as error:  # an answer, though one that requests will fail by
            logger.warning("the worker at %s answers: %s", address, error)
        else:
            logger.info("the worker at %s answers again", address)
        return True
