"""The cluster as the author of a worker sees it: names, and the endpoints that are served."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.runtime.address import EndpointAddress
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ConfigError
from tandem.runtime.membership.model_files import MODEL_FILES_ENDPOINT, ModelFilesHolder
from tandem.runtime.membership.node import Node
from tandem.runtime.plane.server import Responder
from tandem.runtime.process.lifecycle import State
from tandem.runtime.process.logs import setup_logging
from tandem.runtime.store.discovery import register_instance
from tandem.runtime.wire.cluster_messages import LoadReport, WorkerStatus
from tandem.runtime.wire.messages import encode
from tandem.sdk.health.canary import CANARY_INTERVAL_S, Canary
from tandem.sdk.worker.client import Client
from tandem.sdk.worker.cluster import find_cluster
from tandem.sdk.worker.serving import RequestHandler, ServedEndpoint
from tandem.transfer.network_devices import confine_ucx

logger = logging.getLogger(__name__)


class DistributedRuntime(Node):
    """A node as the author of a worker sees it: namespaces, components and endpoints by name.

    Without a config it looks for its cluster (`cluster.find_cluster`).
    """

    def __init__(self, config: RuntimeConfig | None = None, *, component: str = "worker") -> None:
        config = find_cluster() if config is None else config
        confine_ucx(config.host)
        super().__init__(config, component=component)
        self.canary_interval_s = CANARY_INTERVAL_S
        self.served: dict[EndpointAddress, ServedEndpoint] = {}
        self._ending = asyncio.Event()
        self.model_files = ModelFilesHolder()  # of the models that are registered here
        self.server.register("status", self._status)
        self.server.register(MODEL_FILES_ENDPOINT, self.model_files.send)

    def log_by_default(self) -> None:
        """Log to stderr, unless the program has set up the standard library's logging itself."""
        if not logging.getLogger().handlers:
            config = self.config
            setup_logging(config.log_level, self.component, self.instance_id, config.log_format)

    async def _status(self, payload: bytes, context: RequestContext, answer: Responder) -> None:
        """Answer `tandem status` for a process that registers no status of its own."""
        address = next(iter(self.served), EndpointAddress("none", self.component, "none"))
        num_running = sum(served.counts.num_running for served in self.served.values())
        load = LoadReport(self.instance_id, self.epoch, "decode", num_running, 0, 0, 0, 0, 0)
        state = State.DRAINING if self.is_ending else State.SERVING
        answer.send(encode(WorkerStatus(self.instance(address), state.value, load)))

    def shutdown(self) -> None:
        """Begin the orderly end: served endpoints leave discovery, drain and return."""
        self._ending.set()

    async def ending(self) -> None:
        """Wait until `shutdown` was called."""
        await self._ending.wait()

    @property
    def is_ending(self) -> bool:
        """True once `shutdown` was called."""
        return self._ending.is_set()

    async def close(self) -> None:
        """Stop the server and leave the cluster; can be called after a failed `connect`."""
        self.shutdown()
        await super().close()

    # ---- names --------------------------------------------------------------------------------

    def namespace(self, name: str) -> "Namespace":
        """Return a namespace; any name will do."""
        return Namespace(self, name)

    def endpoint(self, path: str) -> "Endpoint":
        """Return an endpoint by its whole name: "ns.comp.ep", "dyn://ns.comp.ep" or "a/b/c"."""
        return Endpoint(self, EndpointAddress.parse(path))


@dataclass(frozen=True, slots=True)
class Namespace:
    """Components that belong together, such as those of one model."""

    runtime: DistributedRuntime
    name: str

    def component(self, name: str) -> "Component":
        """Return a load-balanced part of the pipeline."""
        return Component(self.runtime, self.name, name)


@dataclass(frozen=True, slots=True)
class Component:
    """A part of a pipeline; its processes are instances that share the load."""

    runtime: DistributedRuntime
    namespace: str
    name: str

    async def create_service(self) -> None:
        """Do nothing: a component exists as soon as one of its endpoints is served."""

    def endpoint(self, name: str) -> "Endpoint":
        """Return an endpoint of the component. Raise ConfigError for a malformed name."""
        return Endpoint(self.runtime, EndpointAddress(self.namespace, self.name, name))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A name under which instances of a component answer calls."""

    runtime: DistributedRuntime
    address: EndpointAddress

    async def serve_endpoint(
        self,
        handler: RequestHandler,
        graceful_shutdown: bool = True,
        metrics_labels: list[tuple[str, str]] | None = None,
        health_check_payload: dict[str, Any] | None = None,
    ) -> None:
        """Serve `handler` and register the instance, until the runtime shuts down.

        Then leave discovery, take no new request, and let running ones continue for at most
        `runtime.drain_timeout_s` (not at all with `graceful_shutdown=False`). The rest end as
        incomplete, so that callers resume elsewhere. `metrics_labels` are (name, value) pairs for
        the endpoint's metrics. With a `health_check_payload` an idle handler is called with it
        regularly; an instance that does not answer leaves discovery until it does.
        """
        served = self.serve(handler, metrics_labels or ())
        timeout_s = self.runtime.config.drain_timeout_s if graceful_shutdown else 0.0
        try:
            await self.register()
            logger.info("%s serves %s", self.runtime.instance_id, self.address)
            async with self._health_check(served, health_check_payload):
                await self.runtime.ending()
            await self.runtime.withdraw()
        except BaseException:
            timeout_s = 0.0
            raise
        finally:
            await self.withdraw()
            await served.drain(timeout_s)
            self.runtime.served.pop(self.address, None)

    def _health_check(
        self, served: ServedEndpoint, payload: dict[str, Any] | None
    ) -> contextlib.AbstractAsyncContextManager[object]:
        if payload is None:
            return contextlib.nullcontext()
        counts = served.counts
        return self.canary(
            lambda: served.ask(payload), lambda: counts.num_requests + counts.num_running
        )

    def canary(self, ask: Callable[[], Awaitable[None]], num_requests: Callable[[], int]) -> Canary:
        """Return a health check of this instance, which is in discovery while `ask` succeeds."""

        async def show(is_healthy: bool) -> None:
            await (self.register() if is_healthy else self.withdraw())

        return Canary(ask, num_requests, show, self.runtime.canary_interval_s)

    def serve(
        self, handler: RequestHandler, metrics_labels: Sequence[tuple[str, str]] = ()
    ) -> ServedEndpoint:
        """Answer requests from now on; `register` makes the instance known.

        Raise ConfigError when this process serves the endpoint already, or is not connected.
        """
        if self.address in self.runtime.served:
            raise ConfigError(f"{self.address} is served by this process already")
        if not self.runtime.server.address:
            raise ConfigError(f"{self.address} cannot be served before the runtime is connected")
        served = ServedEndpoint(self.runtime.server, self.address, handler, metrics_labels)
        self.runtime.served[self.address] = served
        return served

    async def register(self) -> None:
        """Put this instance's record into discovery. Idempotent."""
        await register_instance(self.runtime, self.runtime.instance(self.address))

    async def withdraw(self) -> None:
        """Delete this instance's record: no new work comes, running work goes on. Idempotent."""
        await self.runtime.take_back(self.address.instance_key(self.runtime.instance_id))

    register_endpoint_instance = register  # Dynamo's names
    unregister_endpoint_instance = withdraw

    @property
    def is_registered(self) -> bool:
        """True while this instance's record is in discovery, as far as this process knows."""
        return self.runtime.has_put(self.address.instance_key(self.runtime.instance_id))

    async def client(self) -> Client:
        """Return a client of this endpoint that has found the present instances."""
        client = Client(self.address, self.runtime.client, self.runtime.discovery)
        await client.ready()
        return client

    def connection_id(self) -> str:
        """Return the id of this process as an instance."""
        return self.runtime.instance_id
