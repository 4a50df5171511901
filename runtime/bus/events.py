"""Events that correctness does not depend on: load reports and KV events, over core NATS.

tandem.{namespace}.load.{instance_id}    LoadReport
tandem.{namespace}.kv.{instance_id}      KvEvent
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

import nats.errors
from nats.aio.msg import Msg

from tandem.runtime.bus.nats import NatsConnection
from tandem.runtime.tasks import cancel, keep_running

logger = logging.getLogger(__name__)

_MAX_OUTBOX = 10_000  # messages that wait for the socket; more are dropped

Listener = Callable[[str, bytes], None]  # subject, payload
Unsubscribe = Callable[[], Awaitable[None]]


def load_subject(namespace: str, instance_id: str = "*") -> str:
    """Return the subject of an instance's load reports; of all instances by default."""
    return f"tandem.{namespace}.load.{instance_id}"


def kv_subject(namespace: str, instance_id: str = "*") -> str:
    """Return the subject of an instance's KV events; of all instances by default."""
    return f"tandem.{namespace}.kv.{instance_id}"


class Events(Protocol):
    """Publish and subscribe, at most once, in order per publisher."""

    @property
    def connected(self) -> bool:
        """True when a published message may arrive."""
        ...

    async def start(self) -> None:
        """Begin; the connection underneath is up."""
        ...

    def publish(self, subject: str, payload: bytes) -> None:
        """Send without waiting; dropped while disconnected."""
        ...

    async def subscribe(self, subject: str, listener: Listener) -> Unsubscribe:
        """Call `listener` for every message; `*` in the subject stands for one part.

        Return the function that ends the subscription; the end of the connection ends it too.
        """
        ...

    async def close(self) -> None:
        """Stop listening and sending."""
        ...


class NatsEvents:
    """Events over NATS; subscriptions survive its loss, messages sent meanwhile do not."""

    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection
        self._outbox: deque[tuple[str, bytes]] = deque()
        self._wake = asyncio.Event()
        self._publisher: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._connection.connected

    async def start(self) -> None:
        self._publisher = keep_running("the publisher of events", self._publish_all)

    def publish(self, subject: str, payload: bytes) -> None:
        if not self.connected or len(self._outbox) >= _MAX_OUTBOX:
            return
        self._outbox.append((subject, payload))
        self._wake.set()

    async def _publish_all(self) -> None:
        await self._wake.wait()
        while self._outbox:
            subject, payload = self._outbox.popleft()
            try:
                await self._connection.client.publish(subject, payload)
            except (nats.errors.Error, OSError) as error:
                logger.debug("%s was dropped: %r", subject, error)
        self._wake.clear()

    async def subscribe(self, subject: str, listener: Listener) -> Unsubscribe:
        async def on_message(message: Msg) -> None:
            _deliver(listener, message.subject, message.data)

        subscription = await self._connection.client.subscribe(subject, cb=on_message)

        async def unsubscribe() -> None:
            with contextlib.suppress(nats.errors.Error):  # it, or the connection, has ended
                await subscription.unsubscribe()

        return unsubscribe

    async def close(self) -> None:
        await cancel(self._publisher)


class MemoryEvents:
    """Events within one process; those with one list of listeners are connected."""

    def __init__(self, listeners: list[tuple[str, Listener]] | None = None) -> None:
        self._listeners = listeners if listeners is not None else []
        self._own: list[tuple[str, Listener]] = []
        self.connected = False

    async def start(self) -> None:
        self.connected = True

    def publish(self, subject: str, payload: bytes) -> None:
        if not self.connected:
            return
        for pattern, listener in list(self._listeners):
            if _matches(pattern, subject):
                _deliver(listener, subject, payload)

    async def subscribe(self, subject: str, listener: Listener) -> Unsubscribe:
        entry = (subject, listener)
        self._listeners.append(entry)
        self._own.append(entry)

        async def unsubscribe() -> None:
            if entry in self._own:
                self._own.remove(entry)
                self._listeners.remove(entry)

        return unsubscribe

    async def close(self) -> None:
        for entry in self._own:
            self._listeners.remove(entry)
        self._own.clear()
        self.connected = False


def _matches(pattern: str, subject: str) -> bool:
    parts = pattern.split(".")
    names = subject.split(".")
    return len(parts) == len(names) and all(
        part in ("*", name) for part, name in zip(parts, names, strict=True)
    )


def _deliver(listener: Listener, subject: str, payload: bytes) -> None:
    try:
        listener(subject, payload)
    except Exception:
        logger.exception("a listener of %s failed", subject)
