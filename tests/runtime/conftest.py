"""A request-plane server with three small endpoints, and a client."""

from collections.abc import AsyncIterator

import pytest

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.plane.server import RequestServer, Responder

# patient: peers that speak the wire format by hand send no heartbeats
CONFIG = RuntimeConfig(connect_timeout_s=2.0, heartbeat_misses=50)


@pytest.fixture
async def server() -> AsyncIterator[RequestServer]:
    server = RequestServer(CONFIG, "server")

    async def echo(payload: bytes, context: RequestContext, responder: Responder) -> None:
        responder.send(payload)

    async def count(payload: bytes, context: RequestContext, responder: Responder) -> None:
        for i in range(int(payload)):
            responder.send(b"%d" % i)

    async def until_cancelled(
        payload: bytes, context: RequestContext, responder: Responder
    ) -> None:
        responder.send(b"started")
        await context.cancelled()

    server.register("echo", echo)
    server.register("count", count)
    server.register("until_cancelled", until_cancelled)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def client() -> AsyncIterator[RequestClient]:
    client = RequestClient(CONFIG, "client")
    yield client
    await client.close()
