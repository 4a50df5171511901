"""The paths under `/ui`: the page, the stream of its states, and the changes that it makes."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tandem.frontend.bodies.invalid import invalid_field
from tandem.frontend.catalog.catalog import Catalog
from tandem.frontend.errors import OpenAIErrors
from tandem.frontend.http.exchange import Exchange
from tandem.frontend.ui.collector import Collector
from tandem.frontend.ui.page.files import PAGE_FILES
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import (
    ConfigError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    TandemError,
    UnavailableError,
)
from tandem.runtime.membership.node import Node
from tandem.runtime.printable import short
from tandem.runtime.store.discovery import config_key
from tandem.runtime.wire.cluster_messages import RoleChange, WorkerRole
from tandem.runtime.wire.messages import encode

logger = logging.getLogger(__name__)

ParseLive = Callable[[str, str], Any]  # key, text -> value; raises ConfigError
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_ROLE_TIMEOUT_S = 30.0
_WRITE_TIMEOUT_S = 30.0  # a page that reads nothing leaves its place to another one


class _Was(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a change of a live value: the value before, left out where none was set."""

    was: msgspec.Raw | None = None


class Pages:
    """The routes of the page. `parse_live` None: live values cannot be changed here."""

    def __init__(
        self,
        node: Node,
        catalog: Catalog,
        collector: Collector,
        parse_live: ParseLive | None,
    ) -> None:
        self._collector = collector
        self._node = node
        self._catalog = catalog
        self._parse_live = parse_live

    def routes(self) -> list[Route]:
        """Return the routes, none without room for a page; keys are checked before."""
        if self._collector.max_pages == 0:
            return []
        return [
            *(Route(path, self._file) for path in PAGE_FILES),
            Route("/ui/states", self._states),
            Route("/ui/config/{key}", self._set, methods=["PUT"]),
            Route("/ui/config/{key}", self._unset, methods=["DELETE"]),
            Route("/ui/role/{instance_id}", self._change_role, methods=["PUT"]),
        ]

    async def _file(self, request: Request) -> Response:
        file = PAGE_FILES[request.url.path]
        return Response(file.content, headers=_HEADERS, media_type=file.media_type)

    async def _states(self, _request: Request) -> Response:
        return StateStream(self._collector)

    async def _set(self, request: Request) -> Response:
        key, value = request.path_params["key"], request.query_params.get("value")
        if self._parse_live is None:
            raise InvalidRequestError("this frontend cannot change live values", param="key")
        if value is None:
            raise invalid_field("value", "is required")
        with _shown_errors():
            parsed = self._parse_live(key, value)
            if model := request.query_params.get("model"):
                self._catalog.get(model)
            before = await self._live_value(self._key(request))
            await self._node.discovery.put_config(self._key(request), msgspec.json.encode(parsed))
        logger.info("the page set %s to %s%s", key, parsed, _by(request))
        return _json(_Was(before))

    async def _unset(self, request: Request) -> Response:
        with _shown_errors():
            before = await self._live_value(self._key(request))
            await self._node.discovery.delete(self._key(request))
        logger.info("the page unset %s%s", request.path_params["key"], _by(request))
        return _json(_Was(before))

    async def _change_role(self, request: Request) -> Response:
        instance_id = request.path_params["instance_id"]
        role = request.query_params.get("role", "")
        instance = self._collector.worker(instance_id)
        if instance is None:
            raise NotFoundError(f"no worker {short(instance_id)!r}", param="instance_id")
        names: tuple[WorkerRole, ...] = get_args(WorkerRole)
        change = next((RoleChange(name) for name in names if name == role), None)
        if change is None:
            message = f"`role` is {short(role)!r}; the roles are {', '.join(names)}"
            raise InvalidRequestError(message, param="role")
        with _shown_errors():
            async with RequestContext(timeout_s=_ROLE_TIMEOUT_S) as context:
                await self._node.client.call(
                    instance.address, "change_role", encode(change), context
                )
        logger.info("the page gave worker %s the role %s%s", instance_id, role, _by(request))
        return _json(change)

    def _key(self, request: Request) -> str:
        model = request.query_params.get("model", "")
        return config_key(self._node.config.namespace, request.path_params["key"], model)

    async def _live_value(self, key: str) -> msgspec.Raw | None:
        found = (await self._node.discovery.get_prefix(key)).get(key)
        return None if found is None else msgspec.Raw(found)


class StateStream(Response):
    """The states as server-sent events, until the page is closed. A slow page misses some."""

    def __init__(self, collector: Collector) -> None:
        super().__init__()
        self._collector = collector

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, OpenAIErrors())
        with self._collector.page():
            async with RequestContext() as context:
                await exchange.start_stream([])
                exchange.cancel_when_gone(context)
                try:
                    async with asyncio.timeout(_WRITE_TIMEOUT_S):
                        await exchange.write(b"")  # the head alone: a state may be long in coming
                    while not exchange.is_gone and (state := await self._collector.next_state()):
                        async with asyncio.timeout(_WRITE_TIMEOUT_S):
                            await exchange.write(b"data: %b\n\n" % state)
                    await exchange.end_stream(b"")
                except TimeoutError:
                    logger.warning("a page is given up: it read nothing for %g s", _WRITE_TIMEOUT_S)


@contextlib.contextmanager
def _shown_errors() -> Iterator[None]:
    """Raise errors of the cluster as errors of the request, with their reason."""
    try:
        yield
    except (InvalidRequestError, NotFoundError, OverloadedError):
        raise
    except ConfigError as error:
        raise InvalidRequestError(error.message, param=error.param) from error
    except TandemError as error:
        raise UnavailableError(error.message) from error


def _by(request: Request) -> str:
    key = request.scope.get("tandem_key")
    return f", by {key}" if key else ""


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
