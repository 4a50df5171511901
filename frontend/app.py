"""The ASGI application: which path is answered by what.

The two paths that generate go straight to the service; the others are Starlette's.
"""

from collections.abc import Awaitable, Callable

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tandem.frontend.catalog import Catalog, ServedModel
from tandem.frontend.exchange import Exchange
from tandem.frontend.handler import Service
from tandem.frontend.metrics import FrontendMetrics
from tandem.frontend.openai.requests import ChatRequest, CompletionRequest
from tandem.frontend.openai.responses import (
    ErrorBody,
    ErrorDetail,
    ModelList,
    ModelObject,
    error_body,
)
from tandem.runtime.errors import InternalError, NotFoundError, TandemError, UnavailableError

Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]
_GENERATE: dict[str, type[ChatRequest] | type[CompletionRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
_RETRY_AFTER = {"retry-after": "1"}


class App:
    """The whole HTTP surface of a frontend."""

    def __init__(self, service: Service, catalog: Catalog, metrics: FrontendMetrics) -> None:
        self._service = service
        self._catalog = catalog
        self._metrics = metrics
        self._others: Asgi = Starlette(
            routes=[
                Route("/live", self._live),
                Route("/health", self._health),
                Route("/metrics", self._render_metrics),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{model:path}/ready", self._model_ready),
                Route("/v1/models/{model:path}", self._show_model),
            ],
            exception_handlers={
                HTTPException: _on_http_error,
                TandemError: _on_tandem_error,
                Exception: _on_bug,
            },
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = _GENERATE.get(scope["path"]) if scope["type"] == "http" else None
        if kind is None:
            await self._others(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        if scope["method"] == "POST":
            await self._service.handle(exchange, kind, scope["path"])
        else:
            body = _error_json(405, f"{scope['path']} takes POST only")
            await exchange.respond(405, body, [(b"allow", b"POST")])

    def _is_ready(self, model: ServedModel) -> bool:
        return not self._service.is_draining and bool(self._catalog.candidates(model))

    async def _live(self, _request: Request) -> Response:
        return _json(b'{"status":"live"}')

    async def _health(self, _request: Request) -> Response:
        ready = [m.card.name for m in self._catalog.models if self._is_ready(m)]
        if ready:
            return _json(msgspec.json.encode({"status": "ready", "models": ready}))
        if self._service.is_draining:
            raise UnavailableError("this frontend is shutting down")
        raise UnavailableError("no worker is connected")

    async def _render_metrics(self, _request: Request) -> Response:
        self._metrics.set_workers(
            {m.card.name: len(self._catalog.candidates(m)) for m in self._catalog.models}
        )
        return Response(
            self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def _list_models(self, _request: Request) -> Response:
        return _json(msgspec.json.encode(ModelList(list(map(_describe, self._catalog.models)))))

    async def _show_model(self, request: Request) -> Response:
        model = self._catalog.get(request.path_params["model"])
        return _json(msgspec.json.encode(_describe(model)))

    async def _model_ready(self, request: Request) -> Response:
        model = self._catalog.get(request.path_params["model"])
        if not self._is_ready(model):
            raise UnavailableError(f"no worker serves {model.card.name!r} now")
        return _json(b'{"status":"ready"}')


def _describe(model: ServedModel) -> ModelObject:
    card = model.card
    return ModelObject(card.name, card.created_s, card.context_length or msgspec.UNSET)


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


def _error_json(status: int, message: str) -> bytes:
    code = {404: "not_found", 405: "method_not_allowed"}.get(status)
    return msgspec.json.encode(ErrorBody(ErrorDetail(message, "invalid_request_error", None, code)))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        404: f"unknown path {request.url.path!r}",
        405: f"{request.url.path} does not take {request.method}",
    }
    message = messages.get(error.status_code, error.detail)
    headers = dict(error.headers) if error.headers else None
    return _json(_error_json(error.status_code, message), error.status_code, headers)


async def _on_tandem_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    assert isinstance(error, NotFoundError | UnavailableError)
    headers = _RETRY_AFTER if isinstance(error, UnavailableError) else None
    return _json(error_body(error), error.status, headers)


async def _on_bug(_request: Request, _error: Exception) -> Response:
    return _json(error_body(InternalError("internal error")), 500)
