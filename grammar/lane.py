"""One grammar at a time, its callers in turn."""

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator

from tandem.runtime.errors import OverloadedError

RETRY_AFTER_S = 2.0


class Lane:
    """Lets one task in at a time. A caller with many of them does not delay those of others.

    At most `max_waiting` wait, of one caller `max_of_caller`.
    """

    def __init__(self, max_waiting: int, max_of_caller: int) -> None:
        self._max_waiting = max_waiting
        self._max_of_caller = max_of_caller
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._is_taken = False

    @contextlib.asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Wait for a turn and hold it. Raises OverloadedError where too many wait."""
        if self._is_taken:
            await self._wait(caller)
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, caller: str) -> None:
        queue = self._waiting.get(caller, deque())
        num_waiting = sum(map(len, self._waiting.values()))
        if num_waiting >= self._max_waiting or len(queue) >= self._max_of_caller:
            raise OverloadedError(
                f"{num_waiting} grammars wait to be compiled", retry_after_s=RETRY_AFTER_S
            )
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self._waiting[caller] = queue
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the turn to the caller who has waited longest since the last one."""
        while self._waiting:
            caller, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[caller] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False
