"""A process at the other end of the request plane, for tests that stop or kill it.

`plane_peer.py serve` prints its address; `plane_peer.py call ADDRESS` opens a stream there and
prints its first item. Both then wait to be ended.
"""

import asyncio
import sys

import uvloop

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tests.runtime.plane.ends import calling, hold, serving


async def serve() -> None:
    """A server with the endpoint `hold`."""
    async with serving(RuntimeConfig(), {"hold": hold}) as server:
        sys.stdout.write(f"{server.address}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


async def call(address: str) -> None:
    """A client that holds one stream of the endpoint `hold`."""
    async with calling(RuntimeConfig()) as client:
        async for item in await client.open(address, "hold", b"", RequestContext()):
            sys.stdout.write(f"{item.decode()}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(serve() if sys.argv[1] == "serve" else call(sys.argv[2]))
