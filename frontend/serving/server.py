"""The frontend's process: its node, its HTTP server, and their coming and going."""

import asyncio
import logging
import signal
from contextlib import AsyncExitStack

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from tandem.frontend.access.access import Access
from tandem.frontend.access.limits import LIMIT_HEADERS
from tandem.frontend.access.named_worker import NamedWorkers
from tandem.frontend.access.room import Room
from tandem.frontend.access.shared_limits import SharedLimits
from tandem.frontend.catalog.catalog import Catalog
from tandem.frontend.catalog.scrape_targets import ScrapeTargets
from tandem.frontend.catalog.worker_events import WorkerEvents
from tandem.frontend.config import FrontendConfig, new_page_key
from tandem.frontend.generation.deps import FrontendDeps
from tandem.frontend.http.protocol import limited_protocol
from tandem.frontend.serving.app import App, RequestHandler
from tandem.frontend.telemetry.metrics import FrontendMetrics
from tandem.frontend.ui.collector import Collector
from tandem.frontend.ui.pages import Pages, ParseLive
from tandem.frontend.ui.recent import Recent
from tandem.router.config import RouterConfig
from tandem.router.policy import Router
from tandem.runtime.address import EndpointAddress, host_port
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.membership.node import Node
from tandem.runtime.process.http_server import HttpServer
from tandem.runtime.process.lifecycle import Lifecycle, freeze_gc, return_large_buffers
from tandem.runtime.process.logs import setup_logging
from tandem.runtime.process.watched_files import WatchedFiles
from tandem.runtime.store.discovery import register_instance
from tandem.runtime.tasks import cancel
from tandem.runtime.tls import check_pair
from tandem.runtime.tracing.trace import TraceFile

logger = logging.getLogger(__name__)

_GRACE_S = 2  # for responses to be written after the last request has ended


class FrontendServer:
    """One frontend on a connected node, which stays the caller's to close."""

    def __init__(
        self,
        frontend: FrontendConfig,
        router: RouterConfig,
        node: Node,
        parse_live: ParseLive | None = None,
    ) -> None:
        namespace = node.config.namespace
        self._shows_link = frontend.needs_page_key
        if self._shows_link:
            frontend = frontend.model_copy(update={"page_key": new_page_key()})
        self._config = frontend
        self.instance_id = node.instance_id
        self.address = ""  # host:port, once listening
        self._node = node
        self._endpoint = EndpointAddress(namespace, node.component, "http")
        self.catalog = Catalog(
            node.discovery,
            node.client,
            namespace,
            frontend.model_grace_s,
        )
        self._targets = ScrapeTargets(node.discovery, namespace, self.catalog)
        self.router = Router(router)
        self.metrics = FrontendMetrics()
        self._worker_events = WorkerEvents(node.events, self.catalog, node.client, self.router)
        if frontend.tls_cert_file is not None and frontend.tls_key_file is not None:
            check_pair(frontend.tls_cert_file, frontend.tls_key_file, "frontend")
        self.access = Access(frontend)
        self._limits = SharedLimits(
            node.events, namespace, node.instance_id, lambda: self.access.clients
        )
        self.recent = Recent()
        self._trace = TraceFile(node.config.trace_file, "frontend", node.instance_id)
        deps = FrontendDeps(
            frontend,
            self.catalog,
            node.client,
            self.router,
            self.metrics,
            self.recent,
            self._trace,
            NamedWorkers(node.config.cluster_token),
            Room(frontend.max_waiting_requests),
        )
        self.collector = Collector(
            node, self.catalog, self.metrics, self.recent, frontend.max_pages
        )
        pages = Pages(node, self.catalog, self.collector, parse_live)
        self.handler = RequestHandler(deps)
        app = App(self.handler, self.catalog, self.metrics, self._targets, self.access, pages)
        self._http = HttpServer(
            _with_cors(app, frontend.allowed_origins),
            frontend.host,
            frontend.port,
            param="frontend.port",
            listen_fd=frontend.listen_fd,
            grace_s=_GRACE_S,
            keep_alive_s=frontend.keep_alive_s,
            protocol=limited_protocol(frontend),
            tls_cert_file=frontend.tls_cert_file,
            tls_key_file=frontend.tls_key_file,
        )
        tls_files = [file for file in (frontend.tls_cert_file, frontend.tls_key_file) if file]
        self._watched = [
            WatchedFiles(tls_files, self._http.reload_certificate),
            WatchedFiles(self.access.files, self.access.reload),
        ]

    async def start(self) -> None:
        """Listen, then register. Raise ConfigError when the port is taken."""
        await self._trace.__aenter__()
        self._http.bind()
        advertised = self._node.config.advertise_host
        self.address = host_port(advertised, self._http.port) if advertised else self._http.address
        url = f"{self._config.scheme}://{self.address}"
        await self.catalog.start()
        await self._targets.start()
        await self._worker_events.start()
        if self._config.share_limits:
            await self._limits.start()
        if self._config.share_responses:
            await self.handler.responses.share(self._node)
        self._http.serve()
        for watched in self._watched:
            watched.start()
        address = url if self._config.scheme == "https" else self.address
        await register_instance(self._node, self._node.instance(self._endpoint, address))
        logger.info("frontend %s listens on %s", self.instance_id, url)
        if self._shows_link:  # of its own key; another one is known to who gave it
            logger.info("live page: %s", self._config.page_url(url))

    async def hand_over(self) -> None:
        """Leave discovery and new connections to a process that shares the listening socket."""
        logger.info("frontend %s accepts no more connections", self.instance_id)
        await self._node.withdraw()
        await self._http.hand_over(self._config.keep_alive_s)

    async def drain(self) -> None:
        """Leave discovery, refuse new requests, wait for those under way."""
        await self._node.withdraw()
        await self.handler.drain(self._node.config.drain_timeout_s)

    async def stop(self) -> None:
        """End everything; can be called after a `start` that failed."""
        await self._node.withdraw()
        await self.handler.drain(0)
        for watched in self._watched:
            await watched.close()
        await self.collector.close()
        await self._http.close()
        await self.handler.responses.close()
        await self._limits.close()
        await self._worker_events.close()
        await self._targets.close()
        await self.catalog.close()
        await self._trace.__aexit__()


def _with_cors(app: ASGIApp, allowed: list[str]) -> ASGIApp:
    """Return `app` open to web pages of these origins."""
    if not allowed:
        return app
    return CORSMiddleware(
        app,
        allow_origins=allowed,
        allow_methods=["DELETE", "GET", "POST"],
        allow_headers=["*"],
        expose_headers=[
            "x-request-id",
            "retry-after",
            "x-tandem-request-id",
            "traceresponse",
            *LIMIT_HEADERS,
        ],
    )


async def run_frontend(
    frontend: FrontendConfig,
    runtime: RuntimeConfig,
    router: RouterConfig,
    parse_live: ParseLive | None = None,
) -> None:
    """Run a frontend until a signal ends it. `parse_live` checks live values that its page sets.

    With `frontend.listen_fd` SIGUSR1 lets the processes that share that socket take over: it ends
    once no client has a connection to it any more.

    Raise ServiceError when etcd or NATS cannot be reached at start, ConfigError when the port is
    taken.
    """
    node = Node(runtime, component="frontend", serves=False)
    setup_logging(runtime.log_level, node.component, node.instance_id, runtime.log_format)
    lifecycle = Lifecycle(drain_timeout_s=runtime.drain_timeout_s + _GRACE_S)
    stack = AsyncExitStack()
    server: FrontendServer | None = None  # once the node is connected
    handing_over: asyncio.Task[None] | None = None

    async def hand_over() -> None:
        assert server is not None, "the signal has a handler once it has started"
        await server.hand_over()
        lifecycle.shut_down("its connections are closed")

    def begin_hand_over() -> None:
        nonlocal handing_over
        if handing_over is None:
            handing_over = asyncio.create_task(hand_over())
            stack.push_async_callback(cancel, handing_over)

    async def startup() -> None:
        nonlocal server
        stack.push_async_callback(node.close)
        await node.connect()
        server = FrontendServer(frontend, router, node, parse_live)
        stack.push_async_callback(server.stop)
        await server.start()
        if frontend.listen_fd is not None:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGUSR1, begin_hand_over)
        freeze_gc()
        return_large_buffers()

    async def drain() -> None:
        if server is not None:
            await server.drain()

    await lifecycle.run(startup=startup, drain=drain, stop=stack.aclose)
