"""The paths without a body: health, metrics, models, stored responses, the page."""

from collections.abc import Callable
from importlib.metadata import version

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.frontend.bodies.invalid import unsupported
from tandem.frontend.catalog.catalog import Catalog, ServedModel
from tandem.frontend.catalog.scrape_targets import ScrapeTargets
from tandem.frontend.chat.responses import ModelList, ModelObject
from tandem.frontend.errors import BodyError, error_body, http_error_body
from tandem.frontend.responses.shared import SharedResponses
from tandem.frontend.telemetry.metrics import FrontendMetrics
from tandem.frontend.ui.pages import Pages
from tandem.runtime.errors import (
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    TandemError,
    UnavailableError,
)
from tandem.runtime.printable import short

_RETRY_AFTER = {"retry-after": "1"}


class Operations(Starlette):
    """The application of all paths that take no body."""

    def __init__(
        self,
        catalog: Catalog,
        metrics: FrontendMetrics,
        targets: ScrapeTargets,
        responses: SharedResponses,
        is_draining: Callable[[], bool],
        ui: Pages,
    ) -> None:
        self._catalog = catalog
        self._metrics = metrics
        self._targets = targets
        self._responses = responses
        self._is_draining = is_draining
        super().__init__(
            routes=[
                Route("/live", self._live),
                Route("/health", self._health),
                Route("/metrics", self._render_metrics),
                Route("/metrics/targets", self._list_targets),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{model:path}/ready", self._model_ready),
                Route("/v1/models/{model:path}", self._show_model),
                Route("/v1/responses/{id}", self._show_response),
                Route("/v1/responses/{id}", self._delete_response, methods=["DELETE"]),
                Route("/version", self._version),
                *ui.routes(),
            ],
            exception_handlers={
                HTTPException: _on_http_error,
                TandemError: _on_tandem_error,
                Exception: _on_bug,
            },
        )

    def _is_ready(self, model: ServedModel) -> bool:
        return not self._is_draining() and bool(self._catalog.reachable(model))

    async def _live(self, _request: Request) -> Response:
        return _json(b'{"status":"live"}')

    async def _health(self, _request: Request) -> Response:
        ready = [m.card.name for m in self._catalog.models if self._is_ready(m)]
        if ready:
            return _json(msgspec.json.encode({"status": "ready", "models": ready}))
        if self._is_draining():
            raise UnavailableError("this frontend is shutting down")
        raise UnavailableError("no worker is connected")

    async def _render_metrics(self, _request: Request) -> Response:
        self._metrics.set_workers(
            {m.card.name: len(self._catalog.reachable(m)) for m in self._catalog.models}
        )
        return Response(
            self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def _list_targets(self, _request: Request) -> Response:
        return _json(msgspec.json.encode(self._targets.groups()))

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

    async def _show_response(self, request: Request) -> Response:
        if request.query_params.get("stream", "false").lower() != "false":
            raise unsupported("stream")
        stored = await self._responses.get(request.path_params["id"], _owner(request))
        return _json(stored.body)

    async def _delete_response(self, request: Request) -> Response:
        response_id = request.path_params["id"]
        await self._responses.delete(response_id, _owner(request))
        deleted = {"id": response_id, "object": "response", "deleted": True}
        return _json(msgspec.json.encode(deleted))

    async def _version(self, _request: Request) -> Response:
        return _json(msgspec.json.encode({"version": version("tandem-serve")}))


def _owner(request: Request) -> str:
    """Return the name of the request's API key; empty without keys."""
    return str(request.scope.get("tandem_key", ""))


def _describe(model: ServedModel) -> ModelObject:
    card = model.card
    return ModelObject(card.name, card.created_s, card.context_length or msgspec.UNSET)


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = short(request.url.path)
    messages = {
        404: f"unknown path {path!r}",
        405: f"{path} does not take {request.method}",
    }
    message = messages.get(error.status_code, error.detail)
    headers = dict(error.headers) if error.headers else None
    return _json(http_error_body(error.status_code, message), error.status_code, headers)


async def _on_tandem_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    assert isinstance(error, NotFoundError | OverloadedError | InvalidRequestError | BodyError)
    headers = _RETRY_AFTER if isinstance(error, OverloadedError) else None
    return _json(error_body(error), error.status, headers)


async def _on_bug(_request: Request, _error: Exception) -> Response:
    return _json(error_body(InternalError("internal error")), 500)
