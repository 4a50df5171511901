"""The connection of a process to NATS, shared by the queue and the events."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import nats.errors
from nats.aio.client import Client, Srv
from nats.aio.transport import TcpTransport

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ServiceError
from tandem.runtime.printable import masked
from tandem.runtime.tasks import ends_within
from tandem.runtime.tls import client_context

logger = logging.getLogger(__name__)

_RECONNECT_WAIT_S = 0.25
_PING_INTERVAL_S = 1
_CLOSE_TIMEOUT_S = 2.0

Listener = Callable[[], Awaitable[None]]


class _Transport(TcpTransport):
    """nats-py's transport, whose end is not waited for without a bound.

    Under uvloop a connection whose TLS handshake failed never reports its end.
    """

    async def wait_closed(self) -> None:
        closed = super().wait_closed()  # type: ignore[no-untyped-call]
        await ends_within(closed, _CLOSE_TIMEOUT_S / 2)

    def __bool__(self) -> bool:
        return True


class _TolerantClient(Client):
    """nats-py's client, whose read loop survives a message with a malformed subject or header.

    Such a message is delivered without its malformed part: a pull that waits for a message would
    otherwise wait for one that has come already. A `tls:` URL is never used without TLS. Each dial
    is to one of the addresses that `current_urls` returns.
    """

    def __init__(self, current_urls: Callable[[], list[str]]) -> None:
        super().__init__()
        self._current_urls = current_urls
        self._urls = current_urls()

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        try:
            await super()._process_msg(sid, subject, reply, data, headers)
        except Exception as error:
            logger.warning("a malformed message to %r: %r", subject, error)
            readable = subject.decode(errors="replace").encode()
            try:
                await super()._process_msg(sid, readable, reply, data, b"")
            except Exception as again:
                logger.warning("ignoring the message: %r", again)

    async def _connect_to_server(self, s: Srv) -> None:
        if (urls := self._current_urls()) != self._urls:
            self.set_server_pool(urls)
            self._urls = urls
            raise nats.errors.Error("the services file has another address now")
        if self._transport is None and s.uri.scheme in ("nats", "tls"):
            self._transport = _Transport()  # type: ignore[no-untyped-call]
        await super()._connect_to_server(s)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        server = self._current_server
        is_tls = server is not None and server.uri.scheme == "tls"
        if initial_connection and is_tls and not info.get("tls_required"):
            # The library would go on without TLS, and send the password.
            raise nats.errors.Error("the server offers no TLS, which its URL asks for")
        await super()._process_info(info, initial_connection)


class NatsConnection:
    """A connection that reconnects while it is open; it buffers nothing while NATS is away.

    `client` is nats-py's; its `publish` raises OutboundBufferLimitError while disconnected.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        self.url = masked(config.nats_url)  # for messages
        self._config = config
        self._listeners: list[Listener] = []
        self._last_error: Exception | None = None
        self.client = _TolerantClient(self._urls)

    @property
    def connected(self) -> bool:
        """True while NATS is known to be reachable; a frozen server is noticed within 3 s."""
        return self.client.is_connected

    @property
    def num_addresses(self) -> int:
        """The number of servers that the configuration names."""
        return len(self._urls())

    def on_reconnect(self, listener: Listener) -> None:
        """Await `listener` after each reconnection; subscriptions are restored before."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Connect. Raise ServiceError naming the address after `connect_attempts`."""
        started_s = time.perf_counter()
        try:
            await self.client.connect(
                servers=self._urls(),
                tls=client_context(self._config),
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnect,
                reconnected_cb=self._on_reconnect,
                connect_timeout=max(1, int(self._config.connect_timeout_s)),
                reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]
                max_reconnect_attempts=self._config.connect_attempts,
                ping_interval=_PING_INTERVAL_S,
                pending_size=0,  # while disconnected, refuse instead of buffering
            )
        except (nats.errors.Error, OSError, ValueError) as error:
            took_s = time.perf_counter() - started_s
            raise ServiceError(
                f"NATS not reachable at {self.url} after {self._config.connect_attempts} "
                f"attempts ({took_s:.1f} s): {masked(str(self._last_error or error))}"
            ) from error
        self.client.options["max_reconnect_attempts"] = -1
        logger.info("NATS at %s", self.url)

    def _urls(self) -> list[str]:
        return [url.strip() for url in self._config.with_current_services().nats_url.split(",")]

    async def close(self) -> None:
        """Close; idempotent, bounded."""
        self._listeners.clear()
        # In a task of its own: when it interrupts a reconnection, nats-py's close is cancelled by
        # the future that both awaited, and that must not look like a cancellation of the caller.
        closing = asyncio.ensure_future(self.client.close())
        await asyncio.wait({closing}, timeout=_CLOSE_TIMEOUT_S)
        if not closing.done():
            closing.cancel()
            await asyncio.wait({closing})
        if not closing.cancelled() and closing.exception() is not None:
            logger.warning("NATS connection did not close cleanly: %r", closing.exception())

    async def _on_error(self, error: Exception) -> None:
        # A server that refuses a password closes at once, and the reset can overtake its reason.
        if self._last_error is None or not isinstance(error, ConnectionResetError):
            self._last_error = error
        level = logging.WARNING if self.client.is_connected else logging.DEBUG
        logger.log(level, "NATS at %s: %r", self.url, error)

    async def _on_disconnect(self) -> None:
        if not self.client.is_closed:
            logger.warning("NATS at %s is away; reconnecting", self.url)

    async def _on_reconnect(self) -> None:
        logger.info("NATS at %s is back", self.url)
        for listener in self._listeners:
            try:
                await listener()
            except Exception:
                logger.exception("a listener failed after the reconnection to NATS")
