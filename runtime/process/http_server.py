"""An HTTP server of a process: uvicorn on a socket that was bound before, without signals."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any, Literal

import uvicorn

from tandem.runtime.address import host_port
from tandem.runtime.errors import ConfigError
from tandem.runtime.tasks import ends_within
from tandem.runtime.tls import check_pair

_BACKLOG = 2048
_POLL_S = 0.01  # uvicorn tells of no connection's end


class HttpServer:
    """Serves an ASGI application from `serve` until `close`; `bind` takes the port before.

    `param` is the config key of the port, for the error. Port 0 is any free port. `listen_fd` is an
    inherited socket that listens already, to use instead.
    """

    def __init__(
        self,
        app: Callable[..., Any],
        host: str,
        port: int,
        *,
        param: str,
        listen_fd: int | None = None,
        grace_s: int = 1,
        keep_alive_s: int = 5,
        protocol: type[asyncio.Protocol] | Literal["httptools"] = "httptools",
        tls_cert_file: str | None = None,
        tls_key_file: str | None = None,
    ) -> None:
        self._host = host
        self._param = param
        self._listen_fd = listen_fd
        self.port = port  # the real one after `bind`
        self._listener: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self._server = _Server(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=keep_alive_s,
                timeout_graceful_shutdown=grace_s,
                ssl_certfile=tls_cert_file,
                ssl_keyfile=tls_key_file,
            )
        )

    def bind(self) -> None:
        """Listen; connections wait for `serve`. Raise ConfigError when the port is taken."""
        if self._listen_fd is None:
            listener = listen(self._host, self.port, self._param)
        else:
            listener = _inherited(self._listen_fd)
        # Accepted connections inherit it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setblocking(False)
        self.port = int(listener.getsockname()[1])
        self._listener = listener

    @property
    def address(self) -> str:
        """The host and port, as "host:port"."""
        return host_port(self._host, self.port)

    def serve(self) -> None:
        """Answer requests from now on."""
        assert self._listener is not None, "serve before bind"
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    def reload_certificate(self) -> None:
        """Show the certificate that is in its files now to new connections. Raise ConfigError."""
        config = self._server.config
        if config.ssl_certfile and config.ssl_keyfile and config.loaded and config.ssl:
            cert_file, key_file = str(config.ssl_certfile), str(config.ssl_keyfile)
            check_pair(cert_file, key_file, self._param.partition(".")[0])
            config.ssl.load_cert_chain(cert_file, key_file)

    async def hand_over(self, timeout_s: float) -> None:
        """Accept no more connections; answer on the present ones until their clients close them.

        Each answer says that its connection is closed. Idle ones stay for `timeout_s` at most: a
        request may be on its way on them.
        """
        self._server.leave_listeners()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._server.server_state.connections:
                    await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """Stop: requests under way get `grace_s`. Idempotent, also after a `bind` that failed."""
        if self._serving is not None:
            self._server.exiting.set()
            await asyncio.gather(self._serving, return_exceptions=True)
            self._serving = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def listen(host: str, port: int, param: str) -> socket.socket:
    """Return a socket that listens; `param` is the port's key. Raise ConfigError if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)  # here, because a port that is taken may show only now
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{param}: cannot listen on {host}:{port}: {error.strerror}; "
            "choose another port, or 0 for a free one",
            param=param,
        ) from error
    return listener


def _inherited(fd: int) -> socket.socket:
    """Return the socket of an inherited descriptor. Raise ConfigError if it does not listen."""
    try:
        listener = socket.socket(fileno=fd)
        if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return listener
        listener.detach()
        why = "it does not listen"
    except OSError as error:
        why = error.strerror or str(error)
    raise ConfigError(f"file descriptor {fd} is no inherited socket to listen on: {why}")


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers and pauses: the process has signal handlers of its own.

    `exiting` ends it.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.exiting = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not self.exiting.is_set():
            await self.on_tick(0)  # the date header's second
            await ends_within(self.exiting.wait(), 1.0)

    def leave_listeners(self) -> None:
        """Accept no more, and close each connection after its next response."""
        for server in self.servers:
            server.close()
        last = (b"connection", b"close")
        self.config.encoded_headers.append(last)  # of the headers from the next second on
        self.server_state.default_headers.append(last)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while state.connections or state.tasks:
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            for task in state.tasks:
                task.cancel()
