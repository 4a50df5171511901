"""A worker's own small HTTP server: whether it lives, its metrics, and what operators may ask.

GET  /live                    200 as long as the process serves HTTP
GET  /health                  200 when requests are answered, else 503
GET  /metrics                 Prometheus' text format
POST /engine/control/NAME     a JSON object in, a JSON object out
POST /engine/update/NAME      the same
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError, InvalidRequestError, NotFoundError, TandemError

logger = logging.getLogger(__name__)

_VARIABLES = ("TANDEM_SYSTEM_PORT", "DYN_SYSTEM_PORT")
_GRACE_S = 1
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Action = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Actions:
    """What one of the two POST routes can do: the names it knows and who does it."""

    names: Callable[[], Set[str]]
    run: Action


@dataclass(frozen=True, slots=True)
class SystemRoutes:
    """What the server is asked about. `endpoints` gives name |-> whether it answers.

    `more` are routes of whoever runs the server.
    """

    endpoints: Callable[[], Mapping[str, bool]]
    metrics: Callable[[], bytes]
    controls: Actions
    updates: Actions
    more: Sequence[Route] = ()
    started_at_ns: int = field(default_factory=time.perf_counter_ns)


def system_port(config: RuntimeConfig) -> int | None:
    """The port an operator gave, in `runtime.metrics_port` or the environment; None is no server.

    Raises ConfigError that names the variable.
    """
    name = next((name for name in _VARIABLES if os.environ.get(name)), None)
    if config.metrics_port is not None or name is None:
        return config.metrics_port
    text = os.environ[name]
    if not text.lstrip("-").isdigit() or int(text) > 65535:
        raise ConfigError(f"environment variable {name}: {text!r} is not a port", param=name)
    return int(text) if int(text) >= 0 else None  # -1 is how some write "none"


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers: the worker has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class SystemServer:
    """Serves `routes` until `close`."""

    def __init__(self, host: str, port: int, routes: SystemRoutes) -> None:
        self._host = host
        self._routes = routes
        self._serving: asyncio.Task[None] | None = None
        self._http: _Http | None = None
        self.port = port  # the real one after `start`, where it was 0

    async def start(self) -> None:
        """Listens. Raises ConfigError when the port is taken."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self._host, self.port))
            listener.listen()
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"runtime.metrics_port: cannot serve on {self._host}:{self.port}: {error}",
                param="runtime.metrics_port",
            ) from error
        listener.setblocking(False)
        self.port = int(listener.getsockname()[1])
        self._http = _Http(
            uvicorn.Config(
                _app(self._routes),
                log_level="warning",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._serving = asyncio.create_task(self._http.serve(sockets=[listener]))
        logger.info("health and metrics on http://%s:%d", self._host, self.port)

    async def close(self) -> None:
        """Stops; idempotent."""
        if self._http is not None and self._serving is not None:
            self._http.should_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
            self._http = self._serving = None


def _app(routes: SystemRoutes) -> Starlette:
    async def live(_: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def health(_: Request) -> Response:
        endpoints = dict(routes.endpoints())
        is_ready = bool(endpoints) and all(endpoints.values())
        secs, nanos = divmod(time.perf_counter_ns() - routes.started_at_ns, 10**9)
        body = {
            "status": "ready" if is_ready else "notready",
            "uptime": {"secs": secs, "nanos": nanos},
            "endpoints": {name: "ready" if ok else "notready" for name, ok in endpoints.items()},
        }
        return JSONResponse(body, 200 if is_ready else 503)

    async def metrics(_: Request) -> Response:
        return Response(await asyncio.to_thread(routes.metrics), media_type=_METRICS_TYPE)

    async def control(request: Request) -> Response:
        return await _act(request, routes.controls)

    async def update(request: Request) -> Response:
        return await _act(request, routes.updates)

    return Starlette(
        routes=[
            Route("/live", live),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/engine/control/{name:path}", control, methods=["POST"]),
            Route("/engine/update/{name:path}", update, methods=["POST"]),
            *routes.more,
        ]
    )


async def _act(request: Request, actions: Actions) -> Response:
    name = request.path_params["name"]
    try:
        known = actions.names()
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise NotFoundError(f"this engine has no {name!r}; it has: {listed}", param="name")
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
