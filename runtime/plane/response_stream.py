"""The calling side's end of one stream of the request plane."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.runtime.context import RequestContext
from tandem.runtime.errors import CancelledRequestError, InternalError, TandemError
from tandem.runtime.plane.framing import Cancel, Credit, Stop
from tandem.runtime.wire.bounds import MAX_TEXT

if TYPE_CHECKING:
    from tandem.runtime.plane.client import ClientConnection

WINDOW_ITEMS = 256  # items of a stream that may be under way or unread


class ResponseStream:
    """The items of one call, in order, each once; belongs to one reader.

    Iteration ends when the handler returned. It raises the handler's error, ConnectionLostError
    when the peer died, stopped or closed, and CancelledRequestError or DeadlineError when the
    context ended. Leaving `async with` cancels a stream that is not over.
    """

    __slots__ = (
        "_connection", "_context", "_error", "_is_done", "_items", "_num_consumed",
        "_stop_listening", "_stream_id", "_take", "_waiter",
    )  # fmt: skip

    def __init__(self, connection: "ClientConnection", stream_id: int, context: RequestContext):
        self._connection = connection
        self._stream_id = stream_id
        self._context = context
        self._items: list[bytes] = []  # at most a window
        self._num_consumed = 0
        self._waiter: asyncio.Future[bool] | None = None
        self._take: Callable[[list[bytes]], bool] | None = None  # while `pass_on` waits
        self._is_done = False
        self._error: TandemError | None = None
        self._stop_listening: Callable[[], None] = lambda: None

    def __aiter__(self) -> "ResponseStream":
        return self

    async def __anext__(self) -> bytes:
        while not self._items:
            await self._more()
        item = self._items.pop(0)
        self._consume(1)
        return item

    async def take(self) -> list[bytes]:
        """Wait for an item and return all that have arrived; end as iteration does."""
        while not self._items:
            await self._more()
        return self.ready()

    async def pass_on(self, take: Callable[[list[bytes]], bool]) -> None:
        """Call `take` with all items that have arrived, as often as some arrive, until it is False.

        The calls come from the connection, without a turn of the reader's task. Raise the error of
        `take`, and the end as iteration does.
        """
        while True:
            if self._items and not take(self.ready()):
                return
            more = self._more()
            self._take = take
            try:
                if not await more:
                    return
            finally:
                self._take = None

    def pass_on_now(self) -> None:
        """Call the function of `pass_on`, if there is one, with the items that have arrived."""
        take, waiter = self._take, self._waiter
        if take is None or waiter is None or waiter.done() or not self._items:
            return
        try:
            if not take(self.ready()):
                waiter.set_result(False)
        except Exception as error:
            waiter.set_exception(error)

    def _more(self) -> asyncio.Future[bool]:
        """Return a future of the next item or the end. Raise the end if it is there."""
        if self._is_done:
            raise self._error or StopAsyncIteration
        if self._waiter is not None and not self._waiter.done():
            raise InternalError("two readers on one response stream")
        self._waiter = self._connection.new_future()
        return self._waiter

    def ready(self) -> list[bytes]:
        """Return all items that have arrived, without waiting; empty when none has."""
        items, self._items = self._items, []
        if items:
            self._consume(len(items))
        return items

    def cancel(self) -> None:
        """Cancel the call; unread items are dropped. Idempotent."""
        self._cancel("the caller closed the stream")

    @property
    def is_done(self) -> bool:
        """True when nothing more will arrive; items may still be unread."""
        return self._is_done

    async def __aenter__(self) -> "ResponseStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def listen(self) -> None:
        """Send the stop and the end of the context to the server."""
        self._stop_listening = self._context.on_stop_or_cancel(
            self._on_context_stop, self._on_context_end
        )

    def _on_context_stop(self) -> None:
        if not self._is_done:
            self._connection.post(Stop(self._stream_id))

    def _on_context_end(self) -> None:
        error = self._context.error()
        self._cancel(error.message if error else "cancelled", error)

    def _cancel(self, reason: str, error: TandemError | None = None) -> None:
        if self._is_done:
            return
        self._connection.forget(self._stream_id)
        self._connection.post(Cancel(self._stream_id, reason[:MAX_TEXT]))
        self._items.clear()
        self.finish(error or CancelledRequestError(f"request {self._context.id}: {reason}"))

    def _consume(self, num_items: int) -> None:
        self._num_consumed += num_items
        if self._num_consumed * 2 >= WINDOW_ITEMS and not self._is_done:
            self._connection.post(Credit(self._stream_id, self._num_consumed))
            self._num_consumed = 0

    def deliver(self, payload: bytes) -> None:
        """Take one more item from the connection."""
        self._items.append(payload)
        if self._take is not None:
            if len(self._items) == 1:
                self._connection.to_pass_on.append(self)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def finish(self, error: TandemError | None) -> None:
        """End the stream, called by the connection; `error` is raised after the items."""
        if self._is_done:
            return
        self._is_done = True
        self._error = error
        self._stop_listening()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)
