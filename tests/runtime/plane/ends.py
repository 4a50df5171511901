"""The two ends of the request plane, in this process."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.plane.server import Handler, RequestServer, Responder


async def echo(payload: bytes, context: RequestContext, responder: Responder) -> None:
    responder.send(payload)


async def hold(payload: bytes, context: RequestContext, responder: Responder) -> None:
    """One item, then silence."""
    responder.send(b"started")
    await context.cancelled()


@asynccontextmanager
async def serving(
    config: RuntimeConfig, handlers: Mapping[str, Handler] | None = None, **options: Any
) -> AsyncIterator[RequestServer]:
    """A server that listens, with these endpoints; `options` are the constructor's."""
    server = RequestServer(config, "server", **options)
    for endpoint, handler in (handlers or {}).items():
        server.register(endpoint, handler)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def calling(config: RuntimeConfig) -> AsyncIterator[RequestClient]:
    """A client, closed at the end."""
    client = RequestClient(config, "client")
    try:
        yield client
    finally:
        await client.close()
