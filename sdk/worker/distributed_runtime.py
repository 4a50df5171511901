"""A process's place in the cluster: its id, connections, server, and the endpoints it serves."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from tandem.runtime.address import EndpointAddress, new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.discovery import Discovery
from tandem.runtime.errors import ConfigError
from tandem.runtime.etcd import EtcdDiscovery
from tandem.runtime.events import Events, NatsEvents
from tandem.runtime.lifecycle import State
from tandem.runtime.messages import Instance, LoadReport, WorkerStatus, encode
from tandem.runtime.metrics import serve_metrics
from tandem.runtime.nats import NatsConnection
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.plane.server import Handler, RequestServer, Responder
from tandem.sdk.worker.canary import CANARY_INTERVAL_S, Canary
from tandem.sdk.worker.client import Client
from tandem.sdk.worker.cluster import find_cluster
from tandem.sdk.worker.serving import RequestHandler, ServedEndpoint

logger = logging.getLogger(__name__)


class DistributedRuntime:
    """Connects to etcd and NATS, listens on the request plane, and undoes it all in reverse.

    Without a config it looks for its cluster (`cluster.find_cluster`). `progress` gives (steps
    done, busy) of the process's engine; heartbeats carry it.
    """

    def __init__(
        self,
        config: RuntimeConfig | None = None,
        *,
        component: str = "worker",
        model: str = "",
        progress: Callable[[], tuple[int, bool]] | None = None,
    ) -> None:
        self.config = find_cluster() if config is None else config
        self.component = component
        self.model = model
        self.instance_id = new_id()
        self.epoch = new_id()
        self.discovery: Discovery = EtcdDiscovery(self.config)
        self.nats = NatsConnection(self.config)
        self.events: Events = NatsEvents(self.nats)
        self.server = RequestServer(self.config, self.instance_id, progress=progress)
        self.client = RequestClient(self.config, self.instance_id, progress=progress)
        self.canary_interval_s = CANARY_INTERVAL_S
        self.served: dict[EndpointAddress, ServedEndpoint] = {}
        self._records: list[str] = []
        self._ending = asyncio.Event()
        self._stack = AsyncExitStack()

    # ---- lifecycle ----------------------------------------------------------------------------

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
        self.server.register("status", self._status)
        await self.server.start()

    def _serve_metrics(self, port: int) -> Callable[[], None]:
        try:
            return serve_metrics(port, self.config.host)
        except OSError as error:
            raise ConfigError(
                f"runtime.metrics_port: cannot serve on {self.config.host}:{port}: {error}",
                param="runtime.metrics_port",
            ) from error

    async def _status(self, payload: bytes, context: RequestContext, answer: Responder) -> None:
        """What `tandem status` shows of a process that says no more of itself."""
        address = next(iter(self.served), EndpointAddress("none", self.component, "none"))
        num_running = sum(served.num_running for served in self.served.values())
        load = LoadReport(self.instance_id, self.epoch, "decode", num_running, 0, 0, 0, 0, 0)
        state = State.DRAINING if self.is_ending else State.SERVING
        answer.send(encode(WorkerStatus(self.instance(address), state.value, load)))

    def shutdown(self) -> None:
        """Begins the orderly end: served endpoints leave discovery, drain and return."""
        self._ending.set()

    async def ending(self) -> None:
        """Waits until `shutdown` was called."""
        await self._ending.wait()

    @property
    def is_ending(self) -> bool:
        """True once `shutdown` was called."""
        return self._ending.is_set()

    async def close(self) -> None:
        """Stops the server and leaves the cluster; can be called after a failed `connect`."""
        self.shutdown()
        await self._stack.aclose()

    async def __aenter__(self) -> Self:
        try:
            await self.connect()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # ---- records ------------------------------------------------------------------------------

    def instance(self, address: EndpointAddress) -> Instance:
        """This process as the server of an endpoint."""
        return Instance(
            namespace=address.namespace,
            component=address.component,
            endpoint=address.endpoint,
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
        if key not in self._records:
            self._records.append(key)
        await self.discovery.put(key, value)

    async def take_back(self, key: str) -> None:
        """Takes one record back."""
        if key in self._records:
            self._records.remove(key)
            await self.discovery.delete(key)

    async def withdraw(self) -> None:
        """Takes every record back: no new work comes, running work goes on."""
        while self._records:
            await self.discovery.delete(self._records.pop())

    # ---- names --------------------------------------------------------------------------------

    def namespace(self, name: str) -> "Namespace":
        """A pipeline's namespace, of any name."""
        return Namespace(self, name)

    def endpoint(self, path: str) -> "Endpoint":
        """An endpoint by its whole name: "ns.comp.ep", also as "dyn://ns.comp.ep" or "a/b/c"."""
        return Endpoint(self, EndpointAddress.parse(path))


@dataclass(frozen=True, slots=True)
class Namespace:
    """Components that belong together, such as those of one model."""

    runtime: DistributedRuntime
    name: str

    def component(self, name: str) -> "Component":
        """A load-balanced part of the pipeline."""
        return Component(self.runtime, self.name, name)


@dataclass(frozen=True, slots=True)
class Component:
    """A part of a pipeline; its processes are instances that share the load."""

    runtime: DistributedRuntime
    namespace: str
    name: str

    async def create_service(self) -> None:
        """Returns at once: a component exists as soon as one of its endpoints is served."""

    def endpoint(self, name: str) -> "Endpoint":
        """What the component can be called by. Raises ConfigError where a name is none."""
        return Endpoint(self.runtime, EndpointAddress(self.namespace, self.name, name))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What instances of a component answer, and others call."""

    runtime: DistributedRuntime
    address: EndpointAddress

    async def serve_endpoint(
        self,
        handler: RequestHandler,
        graceful_shutdown: bool = True,
        metrics_labels: list[tuple[str, str]] | None = None,
        health_check_payload: dict[str, Any] | None = None,
    ) -> None:
        """Serves `handler` and is known to all, until the runtime shuts down.

        Then it leaves discovery, takes no new request, and lets running ones go on for at most
        `runtime.drain_timeout_s` (not at all with `graceful_shutdown=False`). What is left ends as
        incomplete, so that callers go on elsewhere. `metrics_labels` are (name, value) pairs for
        the endpoint's metrics. With a `health_check_payload` the handler is asked with it whenever
        nobody else asks; an instance that does not answer leaves discovery until it does.
        """
        served = self.serve(handler, metrics_labels or ())
        timeout_s = self.runtime.config.drain_timeout_s if graceful_shutdown else 0.0
        try:
            await self.register()
            logger.info("%s serves %s", self.runtime.instance_id, self.address)
            async with self._checked(served, health_check_payload):
                await self.runtime.ending()
            await self.runtime.withdraw()
        except BaseException:
            timeout_s = 0.0
            raise
        finally:
            await self.withdraw()
            await served.drain(timeout_s)
            self.runtime.served.pop(self.address, None)

    @contextlib.asynccontextmanager
    async def _checked(
        self, served: ServedEndpoint, payload: dict[str, Any] | None
    ) -> AsyncIterator[None]:
        if payload is None:
            yield
            return
        canary = Canary(
            ask=lambda: served.ask(payload),
            num_requests=lambda: served.counts.num_requests + served.counts.num_running,
            on_change=lambda is_healthy: self.register() if is_healthy else self.withdraw(),
            interval_s=self.runtime.canary_interval_s,
        )
        watching = asyncio.create_task(canary.watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    def serve(
        self, handler: RequestHandler, metrics_labels: Sequence[tuple[str, str]] = ()
    ) -> ServedEndpoint:
        """Answers requests from now on; nobody is told (`register` tells).

        Raises ConfigError when this process serves it already, or is not connected.
        """
        if self.address in self.runtime.served:
            raise ConfigError(f"{self.address} is served by this process already")
        if not self.runtime.server.address:
            raise ConfigError(f"{self.address} cannot be served before the runtime is connected")
        served = ServedEndpoint(self.runtime.server, self.address, handler, metrics_labels)
        self.runtime.served[self.address] = served
        return served

    def serve_raw(self, handler: Handler) -> None:
        """Answers bytes with bytes on the request plane; nobody is told (`register` tells)."""
        self.runtime.server.register(str(self.address), handler)

    async def register(self) -> None:
        """Makes this instance known to everyone."""
        record = msgspec.json.encode(self.runtime.instance(self.address))
        await self.runtime.put(self._key(), record)

    async def withdraw(self) -> None:
        """Takes this instance's record back: no new work comes, running work goes on."""
        await self.runtime.take_back(self._key())

    def _key(self) -> str:
        return self.address.instance_key(self.runtime.instance_id)

    async def client(self) -> Client:
        """What calls this endpoint; knows at once the instances there are."""
        client = Client(self.address, self.runtime.client, self.runtime.discovery)
        await client.ready()
        return client

    def connection_id(self) -> str:
        """The id of this process as an instance."""
        return self.runtime.instance_id


def pid_space() -> str:
    """Which kernel and pid namespace this process's pid belongs to; empty where unknown."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot_id}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
