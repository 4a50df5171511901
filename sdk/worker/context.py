"""What a handler is told of its request, and what a caller ends its calls with."""

import asyncio

from tandem.runtime.context import RequestContext

_KILLED = "the caller killed the request"
_TRACEPARENT = "traceparent"


class Context:
    """A request as its handler sees it: who it is, and whether anybody still wants it.

    *Stopped*: come to a good end soon, what is yielded still arrives. *Killed*: the caller is gone,
    nothing arrives any more; a killed request is stopped, too. Calls made with `context=` are
    stopped and killed with it. `headers` travel with the request and its calls (W3C `traceparent`
    among them). Not thread-safe: it belongs to the event loop.
    """

    __slots__ = ("request_context",)

    def __init__(
        self,
        id: str | None = None,
        *,
        headers: dict[str, str] | None = None,
        request_context: RequestContext | None = None,
    ) -> None:
        self.request_context = request_context or RequestContext(id, headers=headers)

    def id(self) -> str:
        """The request's id; calls made with this context carry the same."""
        return self.request_context.id

    @property
    def headers(self) -> dict[str, str]:
        """What travels with the request; a handler may add to it before it calls others."""
        return self.request_context.headers

    def is_stopped(self) -> bool:
        """Whether to come to an end: the caller said so, is gone, or its time is up."""
        return self.request_context.is_stopped

    def is_killed(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self.request_context.is_cancelled

    def stop_generating(self) -> None:
        """Asks whoever works on this request, here and in calls made with it, for a good end."""
        self.request_context.stop()

    def kill(self) -> None:
        """Ends this request and the calls made with it; their streams raise at once."""
        self.request_context.cancel(_KILLED)

    async def async_killed_or_stopped(self) -> bool:
        """Waits until stopped or killed; True, always. Cancel it when the request is done."""
        request = self.request_context
        ended = asyncio.Event()
        undo = (request.on_stop(ended.set), request.on_cancel(ended.set))
        try:
            await ended.wait()
        finally:
            for each in undo:
                each()
        return True

    @property
    def trace_id(self) -> str | None:
        """The 32 hexadecimal digits of W3C's `traceparent`; None outside a trace."""
        return self._trace_part(1, 32)

    @property
    def span_id(self) -> str | None:
        """The caller's span, 16 hexadecimal digits of `traceparent`; None outside a trace."""
        return self._trace_part(2, 16)

    def _trace_part(self, index: int, num_digits: int) -> str | None:
        parts = self.request_context.headers.get(_TRACEPARENT, "").split("-")
        if len(parts) < 4 or len(parts[index]) != num_digits:
            return None
        return parts[index]
