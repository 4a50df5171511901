"""The ASGI application: requests that generate, from the body to the log line, and the others."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor

from starlette.types import Message, Receive, Scope, Send

from tandem.frontend.catalog import Catalog, ServedModel
from tandem.frontend.deps import FrontendDeps
from tandem.frontend.exchange import ClientGoneError, Exchange, caller_id
from tandem.frontend.generation import generate, new_answer
from tandem.frontend.metrics import FrontendMetrics
from tandem.frontend.open_bodies import BodyShare, OpenBodies
from tandem.frontend.openai.errors import (
    TooManyRequestsError,
    error_body,
    http_error_body,
    public_error,
)
from tandem.frontend.openai.requests import ChatRequest, CompletionRequest, parse
from tandem.frontend.openai.sse import StreamSink, event
from tandem.frontend.openai.whole import WholeSink
from tandem.frontend.operations import operations
from tandem.frontend.plan import Planner
from tandem.frontend.request_log import RequestRecord, log_request
from tandem.frontend.text.body import Route, model_named_in, parse_text
from tandem.frontend.text.generation import TextGeneration
from tandem.runtime.address import new_id
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import CancelledRequestError, UnavailableError

logger = logging.getLogger(__name__)

Body = type[ChatRequest] | type[CompletionRequest]
_GENERATE: dict[str, Body] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
_MAX_TRACE_CHARACTERS = 512


class App:
    """The whole HTTP surface of a frontend.

    The two paths that generate do without Starlette, which would take a part of their time.
    """

    def __init__(
        self, handler: "RequestHandler", catalog: Catalog, metrics: FrontendMetrics
    ) -> None:
        self._handler = handler
        self._others: Callable[[Scope, Receive, Send], Awaitable[None]] = operations(
            catalog, metrics, lambda: handler.is_draining
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = _GENERATE.get(scope["path"]) if scope["type"] == "http" else None
        if kind is None:
            await self._others(scope, receive, _with_request_id(scope, send))
            return
        exchange = Exchange(scope, receive, send)
        if scope["method"] == "POST":
            await self._handler.handle(exchange, kind, scope["path"])
        else:
            body = http_error_body(405, f"{scope['path']} takes POST only")
            await exchange.respond(405, body, [(b"allow", b"POST"), *exchange.id_headers(new_id())])


class RequestHandler:
    """Answers chat and completions requests; `is_draining` refuses new ones."""

    def __init__(self, deps: FrontendDeps, executor: Executor) -> None:
        self._deps = deps
        self._planner = Planner(deps.config, executor)
        self._bodies = OpenBodies(deps.config.max_open_body_bytes)
        self._contexts: set[RequestContext] = set()
        self._num_answering = 0  # requests whose body has been read
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False

    async def handle(self, exchange: Exchange, kind: Body, endpoint: str) -> None:
        """Answer one request, by an error if need be, and log it."""
        context = RequestContext(
            timeout_s=self._deps.config.request_timeout_s, headers=_trace(exchange)
        )
        record = RequestRecord(context.id, endpoint)
        self._contexts.add(context)
        self._idle.clear()
        try:
            await self._answer(exchange, kind, context, record)
        except ClientGoneError:
            exchange.is_gone = True
        except asyncio.CancelledError:
            context.cancel("the frontend stopped")
            raise
        except Exception as error:
            context.cancel("the request failed")
            await self._fail(exchange, error, record)
        finally:
            context.close()
            self._contexts.discard(context)
            if not self._contexts:
                self._idle.set()
            record.status, record.is_gone = exchange.status, exchange.is_gone
            log_request(record, self._deps.metrics)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, wait for the present ones, then cancel those that are left."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("canceling %d requests after %g s", len(self._contexts), timeout_s)
            for context in list(self._contexts):
                context.cancel("the frontend is stopping")

    async def _answer(
        self, exchange: Exchange, kind: Body, context: RequestContext, record: RequestRecord
    ) -> None:
        if self.is_draining:
            raise UnavailableError("this frontend is shutting down")
        exchange.check_is_json()
        config = self._deps.config
        share = BodyShare(self._bodies)
        try:
            raw = await exchange.read_body(config.max_body_bytes, config.body_timeout_s, share)
            if self._num_answering >= config.max_inflight_requests:
                raise TooManyRequestsError(
                    f"the frontend answers {config.max_inflight_requests} requests, and no more"
                )
            self._num_answering += 1
            try:
                generation = await self._generation(raw, exchange, kind, context, record)
                del raw  # not needed for as long as the answer takes
                share.give_back()
                watcher = asyncio.get_running_loop().create_task(exchange.cancel_when_gone(context))
                await generation
                del watcher  # it ends with the response; the loop holds it until then
            finally:
                self._num_answering -= 1
        finally:
            share.give_back()

    async def _generation(
        self,
        raw: bytes,
        exchange: Exchange,
        kind: Body,
        context: RequestContext,
        record: RequestRecord,
    ) -> Coroutine[None, None, None]:
        """Return the generation of the answer to a body. It has not begun."""
        route: Route = "chat" if kind is ChatRequest else "completions"
        if self._is_for_text_model(raw):
            text_body = parse_text(route, raw)
            model = self._model(text_body.model, route, record)
            text = TextGeneration(text_body, model, context, exchange, self._deps)
            record.summarize = text.summary
            return text.run()
        body = parse(kind, raw, self._deps.config, self._deps.catalog.longest_context)
        model = self._model(body.model, route, record)
        plan = await self._planner.plan(body, model, context, exchange.headers)
        answer = new_answer(plan, self._deps)
        sink = (StreamSink if body.stream else WholeSink)(answer, exchange)
        record.summarize = answer.summary
        return generate(answer, sink, exchange, self._deps)

    def _is_for_text_model(self, raw: bytes) -> bool:
        catalog = self._deps.catalog
        if not catalog.has_text_models:
            return False
        name = model_named_in(raw)
        return name is not None and catalog.reads_text(name)

    def _model(self, name: str, route: Route, record: RequestRecord) -> ServedModel:
        """Return the model, which is served on this route. Counts the request for the model."""
        model = self._deps.catalog.get(name)
        record.model = name
        self._deps.metrics.add(self._deps.metrics.inflight, name)
        model.check_route(route)
        return model

    async def _fail(self, exchange: Exchange, error: Exception, record: RequestRecord) -> None:
        if exchange.is_gone or exchange.is_over:
            if not isinstance(error, CancelledRequestError):
                logger.error("request %s after its end", record.request_id, exc_info=error)
            return
        if isinstance(error, CancelledRequestError):
            error = UnavailableError("this frontend is shutting down")
        shown = public_error(error, record.request_id)
        record.error = str(error)
        if exchange.is_started:
            exchange.status = shown.status
            await exchange.end_stream(event(error_body(shown)))
        else:
            await exchange.respond_error(shown, exchange.id_headers(record.request_id))


def _with_request_id(scope: Scope, send: Send) -> Send:
    """Return a `send` that adds the caller's own id of the request, or a new one."""

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = caller_id(dict(scope["headers"]).get(b"x-request-id", b""))
            header = (b"x-request-id", own or new_id().encode())
            message["headers"] = [*message.get("headers", ()), header]
        await send(message)

    return send_with_id


def _trace(exchange: Exchange) -> dict[str, str]:
    """Return the W3C trace headers, which travel with the request."""
    trace = {}
    for name in ("traceparent", "tracestate"):
        value = exchange.headers.get(name.encode())
        if value is not None and len(value) <= _MAX_TRACE_CHARACTERS:
            trace[name] = value.decode("latin-1")
    return trace
