"""A request's identity, deadline, stop and cancellation, as it passes through a process."""

import asyncio
import math
import time
from collections.abc import Callable

from tandem.runtime.address import new_id
from tandem.runtime.errors import CancelledRequestError, DeadlineError, TandemError
from tandem.runtime.printable import short

Callback = Callable[[], None]
_DEADLINE = "deadline"


class RequestContext:
    """One request in this process, and the calls that it makes.

    A cancellation, or the deadline, ends the context: every callback is called once. A stop is
    milder: the request continues and should end well soon. `headers` travel with the request
    between processes. `async with` releases the timer; it does not cancel. Not thread-safe: one
    event loop.
    """

    def __init__(
        self,
        id: str | None = None,
        *,
        timeout_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.id = id or new_id()
        self.headers = headers if headers is not None else {}
        self._deadline = math.inf if timeout_s is None else time.perf_counter() + timeout_s
        self._reason: str | None = None
        self._is_stopped = False
        self._on_cancel: dict[object, Callback] = {}  # by the token of a listener
        self._on_stop: dict[object, Callback] = {}
        self._timer: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        """Ask for a good end soon; idempotent, without effect once the request is over."""
        if self._is_stopped or self._reason is not None:
            return
        self._is_stopped = True
        callbacks, self._on_stop = self._on_stop, {}
        for callback in callbacks.values():
            callback()

    def cancel(self, reason: str) -> None:
        """End the request; the first reason stands."""
        if self._reason is not None:
            return
        self._reason = reason
        callbacks, self._on_cancel = self._on_cancel, {}
        self.close()
        for callback in callbacks.values():
            callback()

    @property
    def is_cancelled(self) -> bool:
        """True once cancelled or past the deadline."""
        return self._reason is not None or time.perf_counter() >= self._deadline

    @property
    def is_stopped(self) -> bool:
        """True once stopped, cancelled or past the deadline."""
        return self._is_stopped or self.is_cancelled

    def on_stop(self, callback: Callback) -> Callback:
        """Call `callback` at `stop`, or now if stopped; return the function that removes it."""
        return self._listen(callback, None)

    def on_cancel(self, callback: Callback) -> Callback:
        """Call `callback` at the end, or now if ended; return the function that removes it."""
        return self._listen(None, callback)

    def on_stop_or_cancel(self, stopped: Callback, cancelled: Callback) -> Callback:
        """Call both `on_stop(stopped)` and `on_cancel(cancelled)`; return the undo function."""
        return self._listen(stopped, cancelled)

    def _listen(self, stopped: Callback | None, cancelled: Callback | None) -> Callback:
        token = object()
        if cancelled is not None and self.is_cancelled:
            self.cancel(_DEADLINE)
            cancelled()
        elif cancelled is not None:
            self._on_cancel[token] = cancelled
            if self._timer is None and self._deadline != math.inf:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(self.remaining_s(), self.cancel, _DEADLINE)
        if stopped is not None and self._is_stopped:
            stopped()
        elif stopped is not None:
            self._on_stop[token] = stopped

        def forget() -> None:
            self._on_stop.pop(token, None)
            self._on_cancel.pop(token, None)
            if not self._on_cancel and self._timer is not None:
                self._timer.cancel()
                self._timer = None

        return forget

    async def cancelled(self) -> str:
        """Wait until cancelled or past the deadline; return the reason."""
        if not self.is_cancelled:
            future = asyncio.get_running_loop().create_future()
            remove = self.on_cancel(lambda: None if future.done() else future.set_result(None))
            try:
                await future
            finally:
                remove()
        return self._reason or _DEADLINE

    def remaining_s(self) -> float:
        """Return the seconds left, never negative; infinite without a deadline."""
        return max(0.0, self._deadline - time.perf_counter())

    def error(self) -> TandemError | None:
        """Return the error of a request that is over; None before."""
        if not self.is_cancelled:
            return None
        if self._reason in (None, _DEADLINE):
            return DeadlineError(f"request {short(self.id)}: the deadline has passed")
        return CancelledRequestError(f"request {short(self.id)}: {self._reason}")

    def raise_if_done(self) -> None:
        """Raise CancelledRequestError or DeadlineError when the request is over."""
        if self.is_cancelled and (error := self.error()) is not None:
            raise error

    def close(self) -> None:
        """Forget callbacks and timer."""
        self._on_cancel.clear()
        self._on_stop.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def __aenter__(self) -> "RequestContext":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
