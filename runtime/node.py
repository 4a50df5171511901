"""A worker process's place in the cluster: its id, its connections, its server."""

import os
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from tandem.runtime.address import new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.discovery import Discovery, register_instance
from tandem.runtime.errors import ConfigError
from tandem.runtime.etcd import EtcdDiscovery
from tandem.runtime.events import Events, NatsEvents
from tandem.runtime.messages import Instance
from tandem.runtime.metrics import serve_metrics
from tandem.runtime.nats import NatsConnection
from tandem.runtime.request_plane import RequestClient, RequestServer


class Node:
    """Connects to etcd and NATS, listens on the request plane, and undoes it all in reverse.

    `progress` gives (steps done, busy) of the process's engine; heartbeats carry it.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        component: str,
        model: str = "",
        progress: Callable[[], tuple[int, bool]] | None = None,
    ) -> None:
        self.config = config
        self.component = component
        self.model = model
        self.instance_id = new_id()
        self.epoch = new_id()
        self.discovery: Discovery = EtcdDiscovery(config)
        self.nats = NatsConnection(config)
        self.events: Events = NatsEvents(self.nats)
        self.server = RequestServer(config, self.instance_id, progress=progress)
        self.client = RequestClient(config, self.instance_id, progress=progress)
        self._registered: list[str] = []
        self._stack = AsyncExitStack()

    async def connect(self) -> None:
        """Reaches every service, or raises ServiceError naming the one that cannot be reached."""
        if self.config.metrics_port is not None:
            self._stack.callback(self._serve_metrics(self.config.metrics_port))
        self._stack.push_async_callback(self.client.close)
        self._stack.push_async_callback(self.nats.close)
        await self.nats.start()
        self._stack.push_async_callback(self.discovery.close)
        await self.discovery.start()
        self._stack.push_async_callback(self.events.close)
        await self.events.start()
        self._stack.push_async_callback(self.server.stop)
        await self.server.start()

    def _serve_metrics(self, port: int) -> Callable[[], None]:
        try:
            return serve_metrics(port, self.config.host)
        except OSError as error:
            raise ConfigError(
                f"runtime.metrics_port: cannot serve on {self.config.host}:{port}: {error}",
                param="runtime.metrics_port",
            ) from error

    def instance(self, endpoint: str) -> Instance:
        """This process as the server of `endpoint`."""
        return Instance(
            namespace=self.config.namespace,
            component=self.component,
            endpoint=endpoint,
            instance_id=self.instance_id,
            address=self.server.address,
            epoch=self.epoch,
            model=self.model,
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_space=pid_space(),
        )

    async def put(self, key: str, value: bytes) -> None:
        """Publishes a record that goes when this process goes, or at `withdraw`."""
        self._registered.append(key)
        await self.discovery.put(key, value)

    async def register(self, endpoint: str) -> None:
        """Makes `endpoint` of this process known to everyone."""
        self._registered.append(await register_instance(self.discovery, self.instance(endpoint)))

    async def withdraw(self) -> None:
        """Takes every record back: no new work comes, running work goes on."""
        while self._registered:
            await self.discovery.delete(self._registered.pop())

    async def close(self) -> None:
        """Stops the server and leaves the cluster; can be called after a failed `connect`."""
        await self._stack.aclose()


def pid_space() -> str:
    """Which kernel and pid namespace this process's pid belongs to; empty where unknown."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot_id}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
