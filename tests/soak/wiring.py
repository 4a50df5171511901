"""Bends a worker's addresses, so that its connections lead through proxies."""

import json
from pathlib import Path

from tandem.runtime.plane.client import ClientConnection, RequestClient
from tandem.runtime.plane.server import RequestServer


def listen_behind_proxy(port: int, advertised: str) -> None:
    """The worker listens on `port`, and everybody is told to come to `advertised`."""
    start = RequestServer.start

    async def start_here(self: RequestServer) -> None:
        self._config = self._config.model_copy(update={"port": port})
        await start(self)
        self.address = advertised

    RequestServer.start = start_here  # type: ignore[method-assign]


def dial_through(links: Path) -> None:
    """The worker's own way to some addresses, as the file `links` says at the time.

    In it: advertised address |-> where the worker dials instead.
    """
    dial = RequestClient._dial

    def way_to(address: str) -> str:
        return str(json.loads(links.read_text()).get(address, address))

    async def dial_linked(self: RequestClient, address: str) -> ClientConnection:
        return await dial(self, way_to(address))

    RequestClient._dial = dial_linked  # type: ignore[method-assign]
