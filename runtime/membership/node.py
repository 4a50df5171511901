"""The place of a process in its cluster: its id, its connections, its server and its records."""

import logging
import os
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from tandem.runtime.address import EndpointAddress, host_port, new_id
from tandem.runtime.bus.events import Events, NatsEvents
from tandem.runtime.bus.nats import NatsConnection
from tandem.runtime.config import LogLevel, RuntimeConfig
from tandem.runtime.errors import ConfigError
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.plane.connection import Progress
from tandem.runtime.plane.framing import MAX_FRAME_BYTES
from tandem.runtime.plane.server import RequestServer
from tandem.runtime.process.metrics import serve_metrics
from tandem.runtime.store.discovery import Discovery, config_prefix
from tandem.runtime.store.etcd import EtcdDiscovery
from tandem.runtime.store.live_config import LiveSection
from tandem.runtime.tracing.otel import traced
from tandem.runtime.wire.cluster_messages import Instance


class Node:
    """Starts the parts of a process that join it to its cluster, and closes them in reverse.

    `progress` returns (steps done, busy) of the process's engine, for the heartbeats. A node that
    `serves` listens on the request plane, for frames of at most `max_frame_bytes`. With
    `runtime.metrics_port` such a node, and one that `has_probes`, serves metrics and probes, ready
    while it has records; a frontend has an HTTP server for all of that.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        *,
        component: str,
        model: str = "",
        progress: Progress | None = None,
        serves: bool = True,
        has_probes: bool = False,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        instance_id: str = "",
    ) -> None:
        self.config = config
        self.component = component
        self.model = model
        self.deployment = ""  # of a worker, in its records
        self.metrics_address = ""  # host:port of a worker's metrics, in its records
        self.bootstrap: tuple[str, int] | None = None  # as in Instance
        self.max_prompt_tokens = 0  # as in Instance
        self.rank_pids: list[int] = []  # as in Instance
        self.instance_id = instance_id or new_id()
        self.epoch = new_id()
        self.discovery: Discovery = EtcdDiscovery(config)
        self.nats = NatsConnection(config)
        self.events: Events = NatsEvents(self.nats)
        self.server = RequestServer(
            config, self.instance_id, progress=progress, max_frame_bytes=max_frame_bytes
        )
        self.client = RequestClient(config, self.instance_id, progress=progress)
        self._serves = serves
        self._has_probes = serves or has_probes
        self._records: list[str] = []
        self._stack = AsyncExitStack()

    async def connect(self) -> None:
        """Start every part. Raise ServiceError naming the address that cannot be reached."""
        stack = self._stack
        await stack.enter_async_context(traced(self.component, self.instance_id))
        if self._has_probes and self.config.metrics_port is not None:
            stack.callback(self._serve_metrics(self.config.metrics_port))
        stack.push_async_callback(self.client.close)
        stack.push_async_callback(self.nats.close)
        await self.nats.start()
        stack.push_async_callback(self.discovery.close)
        await self.discovery.start()
        live = self.discovery.watch(config_prefix(self.config.namespace))
        stack.push_async_callback(live.close)
        level = LiveRuntime(log_level=self.config.log_level)
        LiveSection("runtime", level, live, self.config.namespace, self.model, set_log_level)
        stack.push_async_callback(self.events.close)
        await self.events.start()
        if self._serves:
            stack.push_async_callback(self.server.stop)
            await self.server.start()

    def _serve_metrics(self, port: int) -> Callable[[], None]:
        try:
            bound_port, stop = serve_metrics(port, self.config.host, lambda: bool(self._records))
        except OSError as error:
            raise ConfigError(
                f"runtime.metrics_port: cannot serve on {self.config.host}:{port}: {error}",
                param="runtime.metrics_port",
            ) from error
        self.metrics_address = host_port(self.config.reachable_host, bound_port)
        return stop

    async def close(self) -> None:
        """Leave the cluster; can be called after a `connect` that failed."""
        await self._stack.aclose()

    async def __aenter__(self) -> Self:
        try:
            await self.connect()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- records ------------------------------------------------------------------------------

    def instance(self, endpoint: EndpointAddress, address: str = "") -> Instance:
        """This process as a server of `endpoint` at `address`, by default its request server's."""
        return Instance(
            namespace=endpoint.namespace,
            component=endpoint.component,
            endpoint=endpoint.endpoint,
            instance_id=self.instance_id,
            address=address or self.server.address,
            epoch=self.epoch,
            model=self.model,
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_space=pid_space(),
            rank_pids=self.rank_pids,
            deployment=self.deployment,
            metrics=self.metrics_address,
            bootstrap=self.bootstrap,
            max_prompt_tokens=self.max_prompt_tokens,
        )

    async def put(self, key: str, value: bytes) -> None:
        """Put a record, which stays until this process ends or withdraws it."""
        if key not in self._records:
            self._records.append(key)
        await self.discovery.put(key, value)

    def has_put(self, key: str) -> bool:
        """Return True for a record of this process that it has not withdrawn."""
        return key in self._records

    async def take_back(self, key: str) -> None:
        """Delete one record, if this process has put it."""
        if key in self._records:
            self._records.remove(key)
            await self.discovery.delete(key)

    async def withdraw(self) -> None:
        """Delete every record: no new work comes, running work goes on."""
        while self._records:
            await self.discovery.delete(self._records.pop())


class LiveRuntime(BaseModel):
    """What a running process follows of the section `runtime`; all else needs another start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    log_level: LogLevel


def set_log_level(live: LiveRuntime) -> None:
    """Log from this level on."""
    logging.getLogger().setLevel(live.log_level.upper())


@cache
def pid_space() -> str:
    """Return the kernel and pid namespace of this process's pid; empty where unknown."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot_id}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
