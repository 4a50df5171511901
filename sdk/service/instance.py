"""One instance of a service, from its construction to its end."""

import asyncio
from collections.abc import Sequence

from tandem.runtime.errors import TandemError
from tandem.sdk.service.config import ServiceConfig
from tandem.sdk.service.context import Lease, dynamo_context
from tandem.sdk.service.health import called, served_health
from tandem.sdk.service.spec import ServiceSpec, settings_of, spec_of
from tandem.sdk.worker.distributed_runtime import DistributedRuntime


async def serve_service(
    runtime: DistributedRuntime, cls: type, *, graph: Sequence[type] | None = None
) -> None:
    """Construct `cls`, run its hooks, and serve its endpoints until the runtime ends.

    `graph` are the services that run beside it; None: all that it depends on. An error of
    `__init__` or a hook propagates, after the hooks of `on_shutdown`.
    """
    spec = spec_of(cls)
    _fill_context(runtime, spec, graph)
    instance = cls()
    try:
        async with served_health(runtime, spec, instance):
            await _call_all(instance, spec.hooks.get("on_start", ()))
            await _serve_endpoints(runtime, spec, instance)
    finally:
        await _call_all(instance, spec.hooks.get("on_shutdown", ()))


def _fill_context(
    runtime: DistributedRuntime, spec: ServiceSpec, graph: Sequence[type] | None
) -> None:
    namespace = spec.namespace or runtime.config.namespace
    component = runtime.namespace(namespace).component(spec.name)
    dynamo_context.fill(
        {
            "runtime": runtime,
            "namespace": namespace,
            "component": component,
            "endpoints": [component.endpoint(name) for name in spec.endpoints],
            "instance_id": runtime.instance_id,
            "lease": Lease(runtime.instance_id),
            "config": settings_of(spec, ServiceConfig.get_instance()),
            "graph": graph,
        }
    )


async def _call_all(instance: object, methods: Sequence[str]) -> None:
    for method in methods:
        await called(getattr(instance, method))


async def _serve_endpoints(
    runtime: DistributedRuntime, spec: ServiceSpec, instance: object
) -> None:
    component = dynamo_context["component"]
    try:
        async with asyncio.TaskGroup() as group:
            for name, method in spec.endpoints.items():
                handler = getattr(instance, method)
                group.create_task(component.endpoint(name).serve_endpoint(handler))
            await runtime.ending()
    except* TandemError as failures:
        raise failures.exceptions[0] from None
