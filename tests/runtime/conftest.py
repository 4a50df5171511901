"""A request-plane server with three small endpoints, and a client; logging that is set up anew."""

import logging
from collections.abc import AsyncIterator, Iterator

import pytest

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.plane.server import RequestServer, Responder
from tests.runtime.plane.ends import calling, echo, hold, serving

# patient: peers that speak the wire format by hand send no heartbeats
CONFIG = RuntimeConfig(connect_timeout_s=60.0, heartbeat_misses=50)


@pytest.fixture
async def server() -> AsyncIterator[RequestServer]:
    async def count(payload: bytes, context: RequestContext, responder: Responder) -> None:
        for i in range(int(payload)):
            responder.send(b"%d" % i)

    handlers = {"echo": echo, "count": count, "until_cancelled": hold}
    async with serving(CONFIG, handlers) as server:
        yield server


@pytest.fixture
async def client() -> AsyncIterator[RequestClient]:
    async with calling(CONFIG) as client:
        yield client


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Logging may be set up; afterwards it is as before."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
