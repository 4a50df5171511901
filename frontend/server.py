"""The frontend's process: its connections, its HTTP server, and their coming and going."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import uvicorn

from tandem.frontend.app import App
from tandem.frontend.catalog import Catalog
from tandem.frontend.config import FrontendConfig
from tandem.frontend.generation import Services
from tandem.frontend.handler import Service
from tandem.frontend.metrics import FrontendMetrics
from tandem.frontend.worker_events import WorkerEvents
from tandem.router.config import RouterConfig
from tandem.router.policy import Router
from tandem.runtime.address import EndpointAddress, new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.discovery import Discovery, register_instance
from tandem.runtime.errors import ConfigError
from tandem.runtime.etcd import EtcdDiscovery
from tandem.runtime.events import Events, NatsEvents
from tandem.runtime.lifecycle import Lifecycle, freeze_gc
from tandem.runtime.logs import setup_logging
from tandem.runtime.messages import Instance
from tandem.runtime.nats import NatsConnection
from tandem.runtime.request_plane import RequestClient

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_GRACE_S = 2  # for responses to be written after the last request has ended


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers: the process's lifecycle has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class FrontendServer:
    """One frontend over given discovery and events, which the caller has started and closes."""

    def __init__(
        self,
        frontend: FrontendConfig,
        runtime: RuntimeConfig,
        router: RouterConfig,
        discovery: Discovery,
        events: Events,
        instance_id: str | None = None,
    ) -> None:
        self.config = frontend
        self.instance_id = instance_id or new_id()
        self.address = ""  # host:port, once listening
        self._runtime = runtime
        self._discovery = discovery
        self._executor = ThreadPoolExecutor(frontend.tokenizer_threads, "tokenizer")
        self._client = RequestClient(runtime, self.instance_id)
        self.catalog = Catalog(discovery, self._client, runtime.namespace, self._executor)
        self.router = Router(router)
        self.metrics = FrontendMetrics()
        self._worker_events = WorkerEvents(events, self.catalog, self._client, self.router)
        services = Services(frontend, self.catalog, self._client, self.router, self.metrics)
        self.service = Service(services, self._executor)
        self._app = App(self.service, self.catalog, self.metrics)
        self._http: _Http | None = None
        self._serving: asyncio.Task[None] | None = None
        self._key: str | None = None

    async def start(self) -> None:
        """Listen, then be known. Raises ConfigError when the port is taken."""
        listener = _bind(self.config)
        port = listener.getsockname()[1]
        host = self._runtime.advertise_host or self.config.host
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        await self.catalog.start()
        await self._worker_events.start()
        self._http = _Http(self._http_config())
        self._serving = asyncio.create_task(self._http.serve(sockets=[listener]))
        http = EndpointAddress(self._runtime.namespace, "frontend", "http")
        self._key = http.instance_key(self.instance_id)
        await register_instance(self._discovery, self._instance())
        logger.info("frontend %s listens on http://%s", self.instance_id, self.address)

    async def drain(self) -> None:
        """Leave discovery, refuse new requests, let those under way finish."""
        await self._withdraw()
        await self.service.drain(self._runtime.drain_timeout_s)

    async def stop(self) -> None:
        """End everything; can be called after a `start` that failed."""
        await self._withdraw()
        await self.service.drain(0)
        if self._http is not None and self._serving is not None:
            self._http.should_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
        await self._worker_events.close()
        await self.catalog.close()
        await self._client.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _withdraw(self) -> None:
        if self._key is not None:
            key, self._key = self._key, None
            await self._discovery.delete(key)

    def _instance(self) -> Instance:
        return Instance(
            namespace=self._runtime.namespace,
            component="frontend",
            endpoint="http",
            instance_id=self.instance_id,
            address=self.address,
            epoch=new_id(),
            host=socket.gethostname(),
            pid=os.getpid(),
        )

    def _http_config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self._app,
            http="httptools",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=self.config.keep_alive_s,
            timeout_graceful_shutdown=_GRACE_S,
        )


def _bind(config: FrontendConfig) -> socket.socket:
    """A socket on the configured address; accepted ones inherit its TCP_NODELAY."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(_BACKLOG)  # here, because a port that is taken may show only now
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"frontend.port: cannot listen on {config.host}:{config.port}: {error.strerror}; "
            "another port, or 0 for a free one, may do",
            param="frontend.port",
        ) from error
    listener.setblocking(False)
    return listener


async def run_frontend(
    frontend: FrontendConfig, runtime: RuntimeConfig, router: RouterConfig
) -> None:
    """A frontend's whole life, until SIGTERM or SIGINT.

    Raises ServiceError when etcd or NATS cannot be reached at start, ConfigError when the port is
    taken.
    """
    instance_id = new_id()
    setup_logging(runtime.log_level, "frontend", instance_id)
    async with AsyncExitStack() as stack:
        lifecycle = Lifecycle(drain_timeout_s=runtime.drain_timeout_s + _GRACE_S)
        running: list[FrontendServer] = []

        async def startup() -> None:
            discovery = EtcdDiscovery(runtime)
            stack.push_async_callback(discovery.close)
            await discovery.start()
            nats = NatsConnection(runtime)
            stack.push_async_callback(nats.close)
            await nats.start()
            events = NatsEvents(nats)
            stack.push_async_callback(events.close)
            await events.start()
            server = FrontendServer(frontend, runtime, router, discovery, events, instance_id)
            running.append(server)
            await server.start()
            freeze_gc()

        async def drain() -> None:
            for server in running:
                await server.drain()

        async def stop() -> None:
            for server in running:
                await server.stop()

        await lifecycle.run(startup=startup, drain=drain, stop=stop)
