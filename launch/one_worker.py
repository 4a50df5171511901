"""The one running worker that an operator's command names, and a client that reaches it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from tandem.launch.config.live import connected
from tandem.launch.config.model import EffectiveConfig
from tandem.runtime.address import new_id
from tandem.runtime.discovery import Discovery, instances_prefix
from tandem.runtime.errors import NotFoundError
from tandem.runtime.messages import Instance
from tandem.runtime.plane.client import RequestClient


@asynccontextmanager
async def one_worker(
    effective: EffectiveConfig, instance_id: str
) -> AsyncIterator[tuple[RequestClient, Instance]]:
    """Yield a client, and the worker whose id begins with `instance_id`.

    Raises NotFoundError for none or several, and ServiceError where etcd is not reachable.
    """
    runtime = effective.config.runtime
    client = RequestClient(runtime, new_id())
    try:
        async with connected(effective) as discovery:
            instance = await _find(discovery, runtime.namespace, instance_id)
        yield client, instance
    finally:
        await client.close()


async def _find(discovery: Discovery, namespace: str, instance_id: str) -> Instance:
    found: dict[str, Instance] = {}
    for component in ("decode", "prefill"):
        items = await discovery.get_prefix(instances_prefix(namespace, component))
        for value in items.values():
            instance = msgspec.json.decode(value, type=Instance)
            if instance.instance_id.startswith(instance_id):
                found[instance.instance_id] = instance
    if len(found) != 1:
        which = f"{len(found)} workers" if found else "no worker"
        raise NotFoundError(f"{which} of namespace {namespace} begin with {instance_id!r}")
    return next(iter(found.values()))
