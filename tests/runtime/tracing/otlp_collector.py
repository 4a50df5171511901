"""A collector of traces on loopback that keeps the spans it is sent, refuses them or hangs."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web


class Collector:
    """Takes OTLP over HTTP.

    `hangs` True leaves every request without an answer; the first ones get the errors `statuses`.
    """

    def __init__(self, *, hangs: bool = False, statuses: Sequence[int] = ()) -> None:
        self._statuses = list(statuses)
        self.headers: Mapping[str, str] = {}  # of the last request
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.num_requests = 0
        self.url = ""
        self._hangs = hangs
        self._over = asyncio.Event()

    async def __aenter__(self) -> "Collector":
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/traces", self._take)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        self.num_requests += 1
        if self._hangs:
            await self._over.wait()
        if self._statuses:
            return web.Response(status=self._statuses.pop(0))
        self.headers = request.headers
        sent = ExportTraceServiceRequest.FromString(await request.read())
        for resource in sent.resource_spans:
            self.resources.append(
                {each.key: each.value.string_value for each in resource.resource.attributes}
            )
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return web.Response(content_type="application/x-protobuf")
