"""The ASGI application: requests with a body, from the body to the log line, and the others."""

import asyncio
import logging
from collections.abc import Mapping

from starlette.types import Message, Receive, Scope, Send

from tandem.frontend.access.access import Access
from tandem.frontend.access.limits import Charge
from tandem.frontend.access.room import Room
from tandem.frontend.anthropic.api import CountTokensApi, MessagesApi
from tandem.frontend.catalog.catalog import Catalog
from tandem.frontend.catalog.scrape_targets import ScrapeTargets
from tandem.frontend.chat.requests import ChatRequest, CompletionRequest
from tandem.frontend.errors import (
    BodyError,
    MethodError,
    OpenAIErrors,
    RateLimitError,
    TooManyRequestsError,
    public_error,
)
from tandem.frontend.generation.deps import FrontendDeps
from tandem.frontend.http.api import Api, Call
from tandem.frontend.http.exchange import ClientGoneError, Exchange, caller_id
from tandem.frontend.http.open_bodies import BodyShare
from tandem.frontend.openai.api import OpenAIApi
from tandem.frontend.openai.tokenize import DetokenizeApi, TokenizeApi
from tandem.frontend.responses.api import ResponsesApi
from tandem.frontend.responses.shared import SharedResponses
from tandem.frontend.responses.store import ResponseStore
from tandem.frontend.serving.operations import Operations
from tandem.frontend.shapes.generations import Generations
from tandem.frontend.telemetry.metrics import FrontendMetrics
from tandem.frontend.telemetry.request_log import (
    NO_TOKENS,
    AnswerSummary,
    RequestRecord,
    log_request,
)
from tandem.frontend.telemetry.trace import begin_span, end_span
from tandem.frontend.ui.pages import Pages
from tandem.frontend.vectors.api import EmbeddingsApi, RerankApi, ScoreApi
from tandem.runtime.address import new_id
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import CancelledRequestError, TandemError, UnavailableError
from tandem.runtime.process.logs import log_for

logger = logging.getLogger(__name__)

_TRACE_HEADERS = ((b"traceparent", "traceparent"), (b"tracestate", "tracestate"))
_MAX_TRACE_CHARACTERS = 512
_FIRST_SERVER_ERROR = 500  # of the statuses
_READING = ("GET", "HEAD")  # methods that no limit counts
_RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")  # of Jina, Cohere, and both at vLLM
_SCORE_PATHS = ("/v1/score", "/score")  # both of vLLM
_LARGE_BYTES = 64 * 1024  # of a body; reading a smaller one takes a millisecond
_PAGE = "/ui/"  # its files are named relative to its address


class App:
    """The whole HTTP surface of a frontend.

    The paths with an API do without Starlette, which would take a part of their time.
    """

    def __init__(
        self,
        handler: "RequestHandler",
        catalog: Catalog,
        metrics: FrontendMetrics,
        targets: ScrapeTargets,
        access: Access,
        ui: Pages,
    ) -> None:
        self._handler = handler
        self._access = access
        self._metrics = metrics
        self._others = Operations(
            catalog, metrics, targets, handler.responses, lambda: handler.is_draining, ui
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (path := scope["path"]).endswith("/") and not path.startswith(_PAGE):
            scope = {**scope, "path": (path := path.rstrip("/") or "/")}
        api = self._handler.apis.get(path) if scope["type"] == "http" else None
        exchange = Exchange(scope, receive, send, OpenAIErrors() if api is None else api.errors)
        try:
            exchange.client = self._access.client(scope["method"], path, exchange.headers)
            if api is None and exchange.client is not None:
                if scope["method"] not in _READING:
                    exchange.client.admit()  # as a request with a body, which is admitted later
                scope = {**scope, "tandem_key": exchange.client.key.name}
        except (BodyError, RateLimitError) as error:
            await self._refuse(exchange, path, error)
            return
        if api is None:
            await self._others(scope, receive, _with_request_id(scope, send))
        elif scope["method"] == "POST":
            await self._handler.handle(exchange, api, path)
        else:
            headers = [(b"allow", b"POST"), *exchange.id_headers(new_id())]
            await exchange.respond_error(MethodError(f"{path} takes POST only"), headers)

    async def _refuse(self, exchange: Exchange, path: str, error: TandemError) -> None:
        """Answer a request that may not be made, whose body is not read."""
        self._metrics.refusals.add(str(error.status))
        logger.debug("%s: %s", path, error)
        await exchange.respond_error(error, exchange.id_headers(new_id()))


class RequestHandler:
    """Answers what is posted to the paths of `apis`; `is_draining` refuses new requests."""

    def __init__(self, deps: FrontendDeps) -> None:
        self._deps = deps
        generations = Generations(deps)
        config = deps.config
        self.responses = SharedResponses(
            ResponseStore(config.max_stored_responses, config.max_stored_response_bytes)
        )
        self.apis: Mapping[str, Api] = {
            "/v1/chat/completions": OpenAIApi(ChatRequest, "chat", generations),
            "/v1/completions": OpenAIApi(CompletionRequest, "completions", generations),
            "/v1/responses": ResponsesApi(generations, self.responses, config.max_body_bytes),
            "/tokenize": TokenizeApi(generations),
            "/detokenize": DetokenizeApi(generations),
            "/v1/messages": MessagesApi(generations),
            "/v1/embeddings": EmbeddingsApi(generations, deps),
            **dict.fromkeys(_RERANK_PATHS, RerankApi(generations, deps)),
            **dict.fromkeys(_SCORE_PATHS, ScoreApi(generations, deps)),
            "/v1/messages/count_tokens": CountTokensApi(generations),
        }
        self._bodies = Room(config.max_open_body_bytes, config.max_body_bytes)
        self._answering = Room(config.max_inflight_requests)  # requests whose body has been read
        self._turn = asyncio.Lock()  # of large bodies
        self._contexts: set[RequestContext] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False

    async def handle(self, exchange: Exchange, api: Api, endpoint: str) -> None:
        """Answer one request, by an error if need be, and log it."""
        context = RequestContext(
            timeout_s=self._deps.config.request_timeout_s, headers=_trace(exchange)
        )
        span = begin_span(context.headers, self._deps.trace)
        if span is not None:
            exchange.traceparent = span.traceparent
        log_for(context.id, context.headers)
        exchange.ignored.is_refused = self._deps.config.unknown_fields == "refuse"
        record = RequestRecord(context.id, endpoint, exchange.owner)
        call = Call(exchange, context, record, record.key)
        self._contexts.add(context)
        self._idle.clear()
        try:
            await self._answer(api, call)
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
            record.ignored = str(exchange.ignored)
            summary = log_request(record, self._deps.metrics)
            if span is not None:
                end_span(span, record, summary, self._deps.trace)
            if call.charge is not None:
                _end_charge(call.charge, record, summary)

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

    async def _answer(self, api: Api, call: Call) -> None:
        exchange = call.exchange
        if self.is_draining:
            raise UnavailableError("this frontend is shutting down")
        exchange.check_is_json()
        if exchange.client is not None:
            exchange.client.admit()
        config = self._deps.config
        share = BodyShare(self._bodies, call.owner)
        try:
            raw = await exchange.read_body(config.max_body_bytes, config.body_timeout_s, share)
            if not self._answering.take(1, call.owner):
                raise TooManyRequestsError(
                    f"the frontend answers up to {self._answering.limit} requests at one time, and "
                    "of those of one API key a share"
                )
            try:
                if len(raw) > _LARGE_BYTES:  # one in a pass of the event loop, or the streams wait
                    async with self._turn:
                        await asyncio.sleep(0)
                work = await api.prepare(raw, call)
                del raw  # not needed for as long as the answer takes
                if not call.keeps_body:
                    share.give_back()
                exchange.cancel_when_gone(call.context)
                await work
            finally:
                self._answering.give_back(1, call.owner)
        finally:
            share.give_back()

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
            await exchange.end_stream(exchange.errors.event(shown))
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


def _end_charge(charge: Charge, record: RequestRecord, summary: AnswerSummary | None) -> None:
    """Charge for an answer. Only a failure of ours before the first token gives all back.

    A caller who leaves has had the prompt computed, perhaps for nobody.
    """
    has_begun = summary is not None and summary.first_s > 0
    tokens = NO_TOKENS if summary is None or summary.tokens is None else summary.tokens
    is_our_failure = record.status >= _FIRST_SERVER_ERROR and not record.is_gone
    charge.end(tokens.num_generated, is_returned=is_our_failure and not has_begun)


def _trace(exchange: Exchange) -> dict[str, str]:
    """Return the W3C trace headers, which travel with the request."""
    trace: dict[str, str] = {}
    for key, name in _TRACE_HEADERS:
        value = exchange.headers.get(key)
        if value is not None and len(value) <= _MAX_TRACE_CHARACTERS:
            trace[name] = value.decode("latin-1")
    return trace
