"""The router's view of the workers, kept up to date: their KV blocks and their load."""

import logging
from contextlib import AsyncExitStack

from tandem.frontend.catalog.catalog import Catalog
from tandem.router.kv_follower import KvFollower
from tandem.router.policy import Router
from tandem.runtime.bus.events import Events, kv_subject, load_subject
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ProtocolError, UnavailableError
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.wire.cluster_messages import LoadReport
from tandem.runtime.wire.decoding import RefusalLog, decoder

logger = logging.getLogger(__name__)

_SNAPSHOT_TIMEOUT_S = 10.0
_decode_load = decoder(LoadReport)
_refusals = RefusalLog(logger, "a load report")


class WorkerEvents:
    """Subscriber to the events of the catalog's instances, which passes them to the router.

    It subscribes in all namespaces, because workers publish in the namespace of their pipeline.
    """

    def __init__(
        self, events: Events, catalog: Catalog, client: RequestClient, router: Router
    ) -> None:
        self._events = events
        self._catalog = catalog
        self._client = client
        self._router = router
        self._known: set[str] = set()
        self._follower = KvFollower(router.index, self._dump)
        self._stack = AsyncExitStack()
        self._stack.push_async_callback(self._follower.close)

    async def start(self) -> None:
        """Subscribe, and load snapshots of the instances that are known already."""
        for subject, listener in (
            (kv_subject("*"), self._follower.on_event),
            (load_subject("*"), self._on_load),
        ):
            self._stack.push_async_callback(await self._events.subscribe(subject, listener))
        self._stack.callback(self._catalog.subscribe(self._on_instances))
        self._on_instances()

    async def close(self) -> None:
        """End the subscriptions and the snapshots under way."""
        await self._stack.aclose()

    def _on_instances(self) -> None:
        present = set(self._catalog.instances)
        for gone in self._known - present:
            self._follower.remove(gone)
            self._router.remove_instance(gone)
        for new in present - self._known:
            self._follower.add(new, has_dump=self._catalog.sends_kv_events(new))
        self._known = present

    def _on_load(self, subject: str, payload: bytes) -> None:
        sender = subject.rpartition(".")[2]
        if sender not in self._known:
            return
        try:
            report = _decode_load(payload)
        except ProtocolError as error:
            _refusals.note(sender, error)
            return
        if report.instance_id in self._known:
            self._router.update_load(report, self._catalog.block_size(report.instance_id))

    async def _dump(self, instance_id: str) -> bytes:
        instance = self._catalog.instances.get(instance_id)
        if instance is None:
            raise UnavailableError(f"instance {instance_id} has left")
        async with RequestContext(timeout_s=_SNAPSHOT_TIMEOUT_S) as context:
            return await self._client.call(instance.address, "kv_snapshot", b"", context)
