"""`/healthz` and `/readyz` of a service's process, if its operator has set a port."""

import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from prometheus_client import REGISTRY, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tandem.sdk.health.system_server import SystemServer, system_port
from tandem.sdk.service.spec import ServiceSpec
from tandem.sdk.worker.distributed_runtime import DistributedRuntime

logger = logging.getLogger(__name__)


async def called(method: Callable[[], Any]) -> Any:
    """Return the result of a method, async or not."""
    given = method()
    return await given if inspect.isawaitable(given) else given


@contextlib.asynccontextmanager
async def served_health(
    runtime: DistributedRuntime, spec: ServiceSpec, instance: object
) -> AsyncIterator[None]:
    """Serve health at the port of TANDEM_SYSTEM_PORT, if it is set. Raise ConfigError.

    /healthz is 200 when every method of `@liveness` returns true, 503 when one returns false, 500
    when one raises. /readyz is the same with `@readiness`, and 503 until all endpoints are served.
    """
    # the runtime itself serves metrics at a port of the config
    config = runtime.config.model_copy(update={"metrics_port": None})
    port = system_port(config)
    if port is None:
        yield
        return

    def endpoints() -> Mapping[str, bool]:
        known = {address.endpoint for address in runtime.served if address.component == spec.name}
        return {name: name in known and not runtime.is_ending for name in spec.endpoints}

    async def healthz(_: Request) -> Response:
        return await _verdict(instance, spec.hooks.get("liveness", ()))

    async def readyz(_: Request) -> Response:
        if not all(endpoints().values()):
            return JSONResponse({"status": "starting"}, 503)
        return await _verdict(instance, spec.hooks.get("readiness", ()))

    server = SystemServer(
        config.host,
        port,
        endpoints=endpoints,
        metrics=lambda: generate_latest(REGISTRY),
        more=(Route("/healthz", healthz), Route("/readyz", readyz)),
    )
    await server.start()
    try:
        yield
    finally:
        await server.close()


async def _verdict(instance: object, methods: tuple[str, ...]) -> Response:
    for method in methods:
        try:
            is_well = await called(getattr(instance, method))
        except Exception as error:
            logger.exception("%s failed", method)
            message = f"{method}: {type(error).__name__}: {error}"
            return JSONResponse({"status": "error", "message": message}, 500)
        if not is_well:
            return JSONResponse({"status": "unwell", "message": f"{method} says no"}, 503)
    return JSONResponse({"status": "ok"})
