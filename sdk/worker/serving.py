"""From a stream of the request plane to an author's handler and back.

The type of the message chooses the codec: a `Call` carries any value, a `GenerateRequest` becomes
the request of a token model (`token_requests.py`), a `VectorRequest` one for vectors or scores
(`vector_requests.py`), a `TextRequest` that of a text model (`text_requests.py`). The codec encodes
the handler's items for the same caller.
"""

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol

from tandem.runtime.address import EndpointAddress
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ConfigError, IncompleteError, InvalidRequestError
from tandem.runtime.plane.server import RequestServer, Responder
from tandem.runtime.wire.decoding import Decode, decode_value, decoder
from tandem.runtime.wire.messages import Call, GenerateRequest, TextRequest, VectorRequest
from tandem.sdk.health.endpoint_metrics import EndpointCounts
from tandem.sdk.wire.text_requests import TextCodec
from tandem.sdk.wire.token_requests import TokenCodec
from tandem.sdk.wire.values import encode_value, request_reader
from tandem.sdk.wire.vector_requests import VectorCodec
from tandem.sdk.worker.context import Context

logger = logging.getLogger(__name__)

GIVE_UP_S = 1.0  # for cancelled handlers, before the process continues without them
_Request = Call | GenerateRequest | TextRequest | VectorRequest
_decode_request: Decode[_Request] = decoder(_Request, InvalidRequestError)

# `async def handler(request)` or `(request, context)`, a generator or a coroutine
RequestHandler = Callable[..., Any]


class RequestCodec(Protocol):
    """One request as the handler gets it, and the encoding of its items."""

    request: Any

    def encode(self, item: Any) -> bytes:
        """Return an item of the handler as the caller expects it."""
        ...

    def end(self) -> bytes | None:
        """Return the last item that the caller expects after the handler has returned, if any."""
        ...


class CallCodec:
    """Any value in, any values out."""

    def __init__(self, message: Call) -> None:
        self.request = decode_value(memoryview(message.data), InvalidRequestError)
        self.encode = encode_value

    def end(self) -> bytes | None:
        return None


def codec_for(payload: bytes) -> RequestCodec:
    """Return the codec of a stream's payload. Raise InvalidRequestError unless it is a request."""
    message = _decode_request(payload)
    if isinstance(message, Call):
        return CallCodec(message)
    if isinstance(message, GenerateRequest):
        return TokenCodec(message)
    if isinstance(message, VectorRequest):
        return VectorCodec(message)
    return TextCodec(message)


class ServedEndpoint:
    """An endpoint of this process and its running requests; `drain` ends it."""

    def __init__(
        self,
        server: RequestServer,
        address: EndpointAddress,
        handler: RequestHandler,
        metrics_labels: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.address = address
        self.counts = EndpointCounts(str(address), metrics_labels)
        self._server = server
        self._handler = handler
        self._takes_context = takes_context(handler)
        self._read = request_reader(handler)
        self._running: dict[asyncio.Task[Any], RequestContext] = {}
        self._is_over = False
        server.register(str(address), self._serve)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, wait for running ones, and end the rest as incomplete."""
        self._server.unregister(str(self.address))
        if self._running and timeout_s > 0:
            await asyncio.wait(self._running, timeout=timeout_s)
        self._is_over = True
        for task, context in list(self._running.items()):
            context.cancel("the worker stops")
            task.cancel()
        if self._running:
            logger.warning("%s: %d requests end as incomplete", self.address, len(self._running))
            await asyncio.wait(self._running, timeout=GIVE_UP_S)

    async def _serve(self, payload: bytes, context: RequestContext, responder: Responder) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = context
        counts = self.counts
        counts.num_running += 1
        started_s = time.perf_counter()
        try:
            await self._answer(codec_for(payload), context, responder)
            self._raise_if_over()
        except GeneratorExit as error:
            counts.num_failed += 1
            raise IncompleteError(str(error) or "the worker gave up the stream") from error
        except asyncio.CancelledError:
            counts.num_failed += 1
            self._raise_if_over()
            raise
        except Exception:
            counts.num_failed += 1
            raise
        finally:
            counts.num_running -= 1
            counts.num_requests += 1
            counts.seconds += time.perf_counter() - started_s
            del self._running[task]

    def _raise_if_over(self) -> None:
        if self._is_over:
            raise IncompleteError("the worker stopped")

    async def _answer(
        self, codec: RequestCodec, context: RequestContext, responder: Responder
    ) -> None:
        answer = await self._called(codec.request, context)
        if isinstance(answer, AsyncIterator):
            await _send_all(answer, codec, context, responder)
        elif answer is not None:
            responder.send(codec.encode(answer))
        last = codec.end()
        if last is not None and not context.is_cancelled and not self._is_over:
            responder.send(last)

    async def _called(self, value: Any, context: RequestContext) -> Any:
        """Call the handler; return its async iterator, or its only item."""
        request = self._read(value)
        if self._takes_context:
            answer = self._handler(request, Context(request_context=context))
        else:
            answer = self._handler(request)
        if isinstance(answer, Awaitable):
            answer = await answer
        return _turning(answer) if isinstance(answer, Iterator) else answer

    async def ask(self, value: Any) -> None:
        """Run the handler on `value` and drop its items; raise its error."""
        async with RequestContext() as context:
            answer = await self._called(value, context)
            if isinstance(answer, AsyncIterator):
                async for _ in answer:
                    pass


async def _send_all(
    items: AsyncIterator[Any], codec: RequestCodec, context: RequestContext, responder: Responder
) -> None:
    """Send items until the handler ends, or yields after the caller has gone."""
    num_flushes = -1
    try:
        async for item in items:
            if context.is_cancelled:
                break
            responder.send(codec.encode(item))
            if not responder.has_room:
                await responder.drain()
            elif responder.num_flushes == num_flushes:
                # a handler that never waits: flush its items, run other tasks
                await asyncio.sleep(0)
            num_flushes = responder.num_flushes
    finally:
        close = getattr(items, "aclose", None)
        if close is not None:
            await close()


async def _turning(items: Iterator[Any]) -> AsyncIterator[Any]:
    """Yield the items of a plain generator; each is sent before the next is made."""
    try:
        for item in items:
            yield item
            await asyncio.sleep(0)
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            close()


def takes_context(handler: RequestHandler) -> bool:
    """Return True for handlers of (request, context). Raise ConfigError if it takes no request."""
    parameters = [
        parameter
        for parameter in inspect.signature(handler).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if not parameters:
        raise ConfigError(f"handler {handler!r} takes no request", param="handler")
    return len(parameters) > 1 and (
        parameters[1].name == "context" or parameters[1].default is inspect.Parameter.empty
    )
