"""The processes that Prometheus scrapes, as its HTTP service discovery reads them."""

import asyncio
from collections.abc import Iterator

import msgspec

from tandem.frontend.catalog.catalog import Catalog
from tandem.runtime.store.discovery import Discovery, watch_instances
from tandem.runtime.wire.cluster_messages import Instance

_COMPONENTS = ("frontend", "decode", "prefill")


class TargetGroup(msgspec.Struct, frozen=True):
    """One process with the labels of all its series."""

    targets: list[str]  # host:port
    labels: dict[str, str]


class ScrapeTargets:
    """Follows the processes of a namespace, and the workers of every served model."""

    def __init__(self, discovery: Discovery, namespace: str, catalog: Catalog) -> None:
        self._views = [watch_instances(discovery, namespace, name) for name in _COMPONENTS]
        self._catalog = catalog

    async def start(self) -> None:
        """Read the present state of the cluster."""
        await asyncio.gather(*(view.ready() for view in self._views))

    async def close(self) -> None:
        """Stop following."""
        await asyncio.gather(*(view.close() for view in self._views))

    def groups(self) -> list[TargetGroup]:
        """Return a group per process with metrics; a worker with two roles is one process."""
        components: dict[str, set[str]] = {}
        found: dict[str, Instance] = {}
        for instance in self._instances():
            found[instance.instance_id] = instance
            components.setdefault(instance.instance_id, set()).add(instance.component)
        return [
            _group(instance, "both" if len(components[id]) > 1 else instance.component)
            for id, instance in sorted(found.items())
            if instance.metrics or instance.component == "frontend"
        ]

    def _instances(self) -> Iterator[Instance]:
        for view in self._views:
            yield from view.items.values()
        yield from self._catalog.instances.values()


def _group(instance: Instance, role: str) -> TargetGroup:
    labels = {"role": role, "instance_id": instance.instance_id}
    if instance.component != "frontend":
        return TargetGroup([instance.metrics], labels)
    scheme, _, address = instance.address.rpartition("://")
    return TargetGroup([address], {"__scheme__": scheme or "http", **labels})
