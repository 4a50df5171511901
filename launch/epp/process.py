"""`tandem epp`: the gRPC server that a Gateway asks, and its life."""

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tandem.config.epp import EppConfig
from tandem.config.model import EffectiveConfig
from tandem.frontend.access.room import Room
from tandem.frontend.config import FrontendConfig
from tandem.launch.epp.exchange import Exchange, refusal
from tandem.launch.epp.picker import Picker
from tandem.launch.epp.protos import SERVICE, ProcessingRequest, ProcessingResponse
from tandem.router.config import RouterConfig
from tandem.runtime.address import EndpointAddress, host_port, new_id
from tandem.runtime.errors import ConfigError, OverloadedError, ProtocolError
from tandem.runtime.membership.node import Node
from tandem.runtime.process.lifecycle import Lifecycle, freeze_gc
from tandem.runtime.process.logs import setup_logging
from tandem.runtime.store.discovery import register_instance
from tandem.runtime.tls import check_pair

logger = logging.getLogger(__name__)

_READY = ("", "readiness", SERVICE)  # names of health checks; `liveness` is the process's own
_GRACE_S = 2  # beyond the time to drain
_MARGIN_S = 10.0  # beyond the time that a frontend gives to a request
_MARGIN_BYTES = 128 * 1024  # of a message, beyond its body
_REFUSED = 256  # requests that get 429 at one time; gRPC refuses others


class EppServer:
    """An endpoint picker on a connected node, which stays the caller's to close."""

    def __init__(
        self, config: EppConfig, frontend: FrontendConfig, router: RouterConfig, node: Node
    ) -> None:
        self._config, self._frontend = config, frontend
        self.picker = Picker(config, frontend, router, node)
        self._bodies = Room(frontend.max_open_body_bytes)
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", frontend.max_body_bytes + _MARGIN_BYTES),
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=config.max_requests + _REFUSED,
        )
        process = grpc.stream_stream_rpc_method_handler(
            self.process,
            request_deserializer=ProcessingRequest.FromString,
            response_serializer=ProcessingResponse.SerializeToString,
        )
        methods = grpc.method_handlers_generic_handler(SERVICE, {"Process": process})
        self._server.add_generic_rpc_handlers((methods,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.address = ""  # host:port, once listening

    async def start(self) -> None:
        """Follow the cluster, then listen. Raise ConfigError when the port is taken."""
        await self.picker.start()
        wanted = host_port(self._config.host, self._config.port)
        try:
            if (credentials := self._credentials()) is None:
                port = self._server.add_insecure_port(wanted)
            else:
                port = self._server.add_secure_port(wanted, credentials)
        except RuntimeError as error:
            raise ConfigError(f"epp.port: cannot listen on {wanted}", param="epp.port") from error
        await self._server.start()
        self.address = host_port(self._config.host, port)
        await self._set_health(health_pb2.HealthCheckResponse.SERVING, "liveness", *_READY)
        logger.info("endpoint picker listens on %s", self.address)

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests; those under way have `timeout_s` to end."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING, *_READY)
        await self._server.stop(timeout_s)

    async def stop(self) -> None:
        """End everything; can be called after a `start` that failed."""
        await self._server.stop(0)
        await self.picker.close()

    async def _set_health(self, status: Any, *names: str) -> None:
        for name in names:
            await self._health.set(name, status)

    def _credentials(self) -> Any:
        """Return gRPC's, which read the files again for each connection; None without TLS."""
        cert_file, key_file = self._config.tls_cert_file, self._config.tls_key_file
        if cert_file is None or key_file is None:
            return None
        check_pair(cert_file, key_file, "epp")
        cert, key = Path(cert_file), Path(key_file)

        def read() -> Any:
            pair = (key.read_bytes(), cert.read_bytes())
            return grpc.ssl_server_certificate_configuration([pair])

        return grpc.dynamic_ssl_server_credentials(read(), read, False)

    async def process(self, messages: Any, context: Any) -> None:
        """Answer the messages about one request of the Gateway, as gRPC calls it."""
        try:
            async with asyncio.timeout(self._frontend.body_timeout_s) as limit:
                await self._process(messages, context, limit)
        except OverloadedError as error:
            await context.write(refusal(error))
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request's time is up")

    async def _process(self, messages: Any, context: Any, limit: asyncio.Timeout) -> None:
        """Answer each message. The body has a time to come, and then the answer has its own."""
        request_id, max_body_bytes = new_id(), self._frontend.max_body_bytes
        try:
            self.picker.begin()
        except OverloadedError:
            await anext(aiter(messages), None)  # whose writer would else see a broken stream
            raise
        exchange = Exchange(request_id, self.picker, self._bodies, max_body_bytes)
        try:
            async for message in messages:
                was_picked = exchange.is_picked
                for answer in await exchange.take(message):
                    await context.write(answer)
                if exchange.is_picked and not was_picked:
                    exchange.close()
                    rest_s = self._frontend.request_timeout_s + _MARGIN_S
                    limit.reschedule(asyncio.get_running_loop().time() + rest_s)
        finally:
            exchange.close()
            self.picker.finished(request_id)


async def run_epp(effective: EffectiveConfig) -> None:
    """Answer a Gateway until a signal ends the process.

    Raise ServiceError without NATS and etcd, ConfigError when the port is taken.
    """
    config = effective.config
    node = Node(config.runtime, component="epp", serves=False, has_probes=True)
    setup_logging(
        config.runtime.log_level, node.component, node.instance_id, config.runtime.log_format
    )
    lifecycle = Lifecycle(drain_timeout_s=config.runtime.drain_timeout_s + _GRACE_S)
    stack = AsyncExitStack()
    server: EppServer | None = None  # once the node is connected

    async def startup() -> None:
        nonlocal server
        stack.push_async_callback(node.close)
        await node.connect()
        server = EppServer(config.epp, config.frontend, config.router, node)
        stack.push_async_callback(server.stop)
        await server.start()
        endpoint = EndpointAddress(config.runtime.namespace, node.component, "ext_proc")
        await register_instance(node, node.instance(endpoint, server.address))
        freeze_gc()

    async def drain() -> None:
        await node.withdraw()
        if server is not None:
            await server.drain(config.runtime.drain_timeout_s)

    await lifecycle.run(startup=startup, drain=drain, stop=stack.aclose)
