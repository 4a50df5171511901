"""The serving side of the request plane: endpoints and their connections."""

import asyncio
import logging
import ssl

from tandem.runtime.address import host_port
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConnectionLostError, ServiceError, UnavailableError
from tandem.runtime.plane.connection import Progress
from tandem.runtime.plane.framing import MAX_FRAME_BYTES
from tandem.runtime.plane.server_connection import Handler, Responder, ServerConnection
from tandem.runtime.printable import short
from tandem.runtime.tls import server_context

__all__ = ["Handler", "RequestServer", "Responder"]

logger = logging.getLogger(__name__)

STOP_PATIENCE_S = 2.0  # for cancelled handlers to end
MAX_UNFINISHED_BYTES = 256 * 1024 * 1024  # of all connections: frames whose end has not arrived


class RequestServer:
    """Serves named endpoints to any client of the cluster.

    `progress` returns (engine steps done, busy) for the heartbeats; None is never busy. A frame of
    a client with more than `max_frame_bytes` ends its connection.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        instance_id: str,
        *,
        progress: Progress | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._config = config
        self._instance_id = instance_id
        self.progress = progress
        self.max_frame_bytes = max_frame_bytes
        self.num_unfinished_bytes = 0
        self.connections: set[ServerConnection] = set()
        self._handlers: dict[str, Handler] = {}
        self.running: set[asyncio.Task[None]] = set()  # of handlers
        self._server: asyncio.Server | None = None
        self._is_stopping = False
        self.address = ""

    def register(self, endpoint: str, handler: Handler) -> None:
        """Serve `endpoint` by `handler`: a return ends the stream, an error fails it.

        A stream whose context ended fails with the context's error in any case.
        """
        self._handlers[endpoint] = handler

    def unregister(self, endpoint: str) -> None:
        """Refuse new streams of `endpoint` with UnavailableError; running ones go on."""
        self._handlers.pop(endpoint, None)

    async def start(self) -> None:
        """Listen and set `address`. Raise ServiceError when the configured ports are taken.

        ConfigError for a file of TLS that cannot be used.
        """
        host, context = self._config.host, server_context(self._config)
        for port in self._config.listen_ports:
            try:
                self._server = await self._listen(host, port, context)
                break
            except OSError as error:
                taken = error
        else:
            raise ServiceError(self._cannot_listen(taken)) from taken
        bound_port = self._server.sockets[0].getsockname()[1]
        self.address = host_port(self._config.reachable_host, bound_port)
        logger.info("request plane of %s listens on %s", self._instance_id, self.address)

    async def _listen(self, host: str, port: int, context: ssl.SSLContext | None) -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(
            lambda: ServerConnection(self, self._config, self._instance_id),
            host,
            port,
            ssl=context,
            ssl_handshake_timeout=self._config.connect_timeout_s if context else None,
        )

    def _cannot_listen(self, error: OSError) -> str:
        host, ports = self._config.host, self._config.port_range
        if ports is not None:
            return f"runtime.port_range: cannot listen on any of {host}, ports {ports}: {error}"
        key = "runtime.port" if self._config.port else "runtime.host"
        return f"{key}: cannot listen on {host_port(host, self._config.port)}: {error}"

    def admit(self, endpoint: str) -> Handler:
        """Return the endpoint's handler. Raise UnavailableError without one, or after `stop`."""
        if self._is_stopping:
            raise UnavailableError(f"{self._instance_id} is stopping")
        handler = self._handlers.get(endpoint)
        if handler is None:
            # Perhaps not yet: a new worker at the address of a dead one may be starting.
            raise UnavailableError(f"{self._instance_id} has no endpoint {short(endpoint)!r}")
        return handler

    def shed(self) -> None:
        """Close the connection with the largest unfinished frame while there are too many bytes."""
        while self.num_unfinished_bytes > MAX_UNFINISHED_BYTES:
            largest = max(self.connections, key=lambda each: each.num_unfinished_bytes)
            held = f"{self.num_unfinished_bytes} bytes of unfinished frames are held"
            logger.warning("closing the connection with %s: %s", largest.peer, held)
            largest.abort(ConnectionLostError(held))

    async def stop(self) -> None:
        """Stop listening, cancel running handlers, close all connections.

        A handler that does not end within `STOP_PATIENCE_S` is abandoned; the closed connection
        ends its stream.
        """
        self._is_stopping = True
        if self._server is not None:
            self._server.close()
        tasks = list(self.running)
        for task in tasks:
            task.cancel()
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=STOP_PATIENCE_S)
            if stuck:
                logger.warning("%d handlers did not end when they were cancelled", len(stuck))
        connections = list(self.connections)
        for connection in connections:
            connection.close(ConnectionLostError("the server stopped"))
        await asyncio.gather(*(connection.wait_closed() for connection in connections))
