"""The context of a request: for its handler, and for a caller to end its calls."""

import asyncio
from typing import Any

from tandem.runtime.context import RequestContext
from tandem.runtime.tracing.span_ids import span_id_of, trace_id_of

_KILLED = "the caller killed the request"


class Context:
    """A request as its handler sees it: its id, its headers, and its end.

    *Stopped*: the handler should end well soon, and its items still arrive. *Killed*: the caller is
    gone, and no item arrives; a killed request is also stopped. Calls made with `context=` are
    stopped and killed with it. `headers` travel with the request and its calls (W3C `traceparent`
    among them). Not thread-safe: it belongs to the event loop.
    """

    __slots__ = ("request_context", "span")

    def __init__(
        self,
        id: str | None = None,
        *,
        headers: dict[str, str] | None = None,
        request_context: RequestContext | None = None,
    ) -> None:
        self.request_context = request_context or RequestContext(id, headers=headers)
        self.span: Any = None  # of OpenTelemetry, while the worker has one for the request

    def id(self) -> str:
        """Return the request's id, which calls made with this context carry too."""
        return self.request_context.id

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the request and its calls; a handler may add some before a call."""
        return self.request_context.headers

    def is_stopped(self) -> bool:
        """Return True once the caller asked for the end or is gone, or the deadline has passed."""
        return self.request_context.is_stopped

    def is_killed(self) -> bool:
        """Return True once no caller waits for the answer."""
        return self.request_context.is_cancelled

    def stop_generating(self) -> None:
        """Ask the handlers of this request, here and in calls made with it, for a good end."""
        self.request_context.stop()

    def kill(self) -> None:
        """End this request and the calls made with it; their streams raise at once."""
        self.request_context.cancel(_KILLED)

    async def async_killed_or_stopped(self) -> bool:
        """Wait until stopped or killed; return True. Cancel it when the request is done."""
        ended = asyncio.Event()
        undo = self.request_context.on_stop_or_cancel(ended.set, ended.set)
        try:
            await ended.wait()
        finally:
            undo()
        return True

    @property
    def trace_id(self) -> str | None:
        """The trace's id in W3C's `traceparent`, 32 hexadecimal digits; None outside a trace."""
        return trace_id_of(self.headers) or None

    @property
    def span_id(self) -> str | None:
        """The caller's span in `traceparent`, 16 hexadecimal digits; None outside a trace."""
        return span_id_of(self.headers) or None
