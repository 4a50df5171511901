"""A worker's small HTTP server: liveness, health, metrics, and the engine's actions.

GET  /live                    200 as long as the process serves HTTP
GET  /health                  200 when requests are answered, else 503
GET  /metrics                 Prometheus' text format
POST /engine/control/NAME     a JSON object in, a JSON object out
POST /engine/update/NAME      the same
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError, InvalidRequestError, NotFoundError, TandemError
from tandem.runtime.process.http_server import HttpServer

logger = logging.getLogger(__name__)

_VARIABLES = ("TANDEM_SYSTEM_PORT", "DYN_SYSTEM_PORT")
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Action = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Actions:
    """The actions of one of the two POST routes: their names, and the function that runs them."""

    names: Callable[[], Set[str]]
    run: Action


def system_port(config: RuntimeConfig) -> int | None:
    """Return the port in `runtime.metrics_port` or the environment; None for no server.

    Raise ConfigError that names the variable.
    """
    name = next((name for name in _VARIABLES if os.environ.get(name)), None)
    if config.metrics_port is not None or name is None:
        return config.metrics_port
    text = os.environ[name]
    if not text.lstrip("-").isdigit() or int(text) > 65535:
        raise ConfigError(f"environment variable {name}: {text!r} is not a port", param=name)
    return int(text) if int(text) >= 0 else None  # -1 also means none


class SystemServer(HttpServer):
    """Serves the health, metrics and actions of a worker from `start` until `close`.

    `endpoints` returns name |-> True if it answers. `actions` has the actions of POST
    /engine/KIND/NAME, by kind. `more` are additional routes.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        endpoints: Callable[[], Mapping[str, bool]],
        metrics: Callable[[], bytes],
        actions: Mapping[str, Actions] | None = None,
        more: Sequence[Route] = (),
    ) -> None:
        self._endpoints = endpoints
        self._metrics = metrics
        self._started_at_ns = time.perf_counter_ns()
        routes = [
            Route("/live", self._live),
            Route("/health", self._health),
            Route("/metrics", self._scrape),
            *(
                Route(f"/engine/{kind}/{{name:path}}", partial(_act, each), methods=["POST"])
                for kind, each in (actions or {}).items()
            ),
            *more,
        ]
        app = Starlette(routes=routes)
        super().__init__(app, host, port, param="runtime.metrics_port")

    async def start(self) -> None:
        """Listen and serve. Raise ConfigError when the port is taken."""
        self.bind()
        self.serve()
        logger.info("health and metrics on http://%s", self.address)

    async def _live(self, _: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def _health(self, _: Request) -> Response:
        endpoints = dict(self._endpoints())
        is_ready = bool(endpoints) and all(endpoints.values())
        secs, nanos = divmod(time.perf_counter_ns() - self._started_at_ns, 10**9)
        body = {
            "status": "ready" if is_ready else "notready",
            "uptime": {"secs": secs, "nanos": nanos},
            "endpoints": {name: "ready" if ok else "notready" for name, ok in endpoints.items()},
        }
        return JSONResponse(body, 200 if is_ready else 503)

    async def _scrape(self, _: Request) -> Response:
        return Response(await asyncio.to_thread(self._metrics), media_type=_METRICS_TYPE)


async def _act(actions: Actions, request: Request) -> Response:
    name = request.path_params["name"]
    try:
        known = actions.names()
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise NotFoundError(
                f"this engine has no action {name!r}; it has: {listed}", param="name"
            )
        return JSONResponse(await actions.run(name, _object(await request.body())))
    except TandemError as error:
        return JSONResponse({"status": "error", "message": error.message}, error.status)
    except Exception as error:
        logger.exception("%s failed", request.url.path)
        message = f"{type(error).__name__}: {error}"
        return JSONResponse({"status": "error", "message": message}, 500)


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body) if body.strip() else {}
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the body is not JSON: {error}", param="body") from error
    if not isinstance(value, dict):
        raise InvalidRequestError("the body is not a JSON object", param="body")
    return value
