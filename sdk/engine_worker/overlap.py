"""Both legs of a disaggregated request at once: they meet at an address of the prefill engine.

Both get the same `bootstrap_info` and pass the KV cache among themselves. Without such an address
the prefill comes first, and its result is in the other leg's request.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from tandem.runtime.errors import (
    CancelledRequestError,
    DeadlineError,
    InvalidRequestError,
    TandemError,
)
from tandem.sdk.engine.types import BootstrapInfo, GenerateChunk

logger = logging.getLogger(__name__)

# Errors that are not the prefill worker's: local prefill would not avoid them.
FINAL = (CancelledRequestError, DeadlineError, InvalidRequestError)
_AFTER_ANSWER_S = 10.0  # for which a prefill may go on when the answer is over
_ROOM_BITS = 63  # fits into the integers of any engine


def meeting(address: tuple[str, int]) -> BootstrapInfo:
    """Return the info for the legs of one request; its room is random."""
    host, port = address
    room = secrets.randbits(_ROOM_BITS)
    return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}


class PrefillLeg:
    """The prefill of a request, under way at another engine; `end` it with the request."""

    def __init__(self, request_id: str, work: Coroutine[Any, Any, None]) -> None:
        self._request_id = request_id
        self._task = asyncio.create_task(work)
        self._task.add_done_callback(self._done)
        self._error: BaseException | None = None
        self._limit: asyncio.Timeout | None = None  # of the wait for the first chunk

    async def first_of(self, chunks: AsyncIterator[GenerateChunk]) -> GenerateChunk | None:
        """Return the first chunk of the other leg; None when this leg failed before it.

        Then `chunks` are over. Raise the error of this leg if the caller is at fault.
        """
        try:
            async with asyncio.timeout(None) as self._limit:
                self._give_up()
                return await anext(chunks)
        except TimeoutError:
            if self._error is None:
                raise
        finally:
            self._limit = None
        if isinstance(self._error, FINAL):
            raise self._error
        reason = self._error.message if isinstance(self._error, TandemError) else self._error
        logger.warning(
            "request %s begins anew without a remote prefill: %s", self._request_id, reason
        )
        return None

    def end(self, *, at_once: bool) -> None:
        """Let the prefill come to its end for a while, or cancel it `at_once`."""
        if at_once:
            self._task.cancel()
        elif not self._task.done():
            asyncio.get_running_loop().call_later(_AFTER_ANSWER_S, self._task.cancel)

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._error = task.exception()
        self._give_up()

    def _give_up(self) -> None:
        if self._error is not None and self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())
