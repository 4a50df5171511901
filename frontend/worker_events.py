"""Keeps the router's picture of the workers: their KV, their load, their coming and going."""

import asyncio
import logging
from collections import deque

import msgspec

from tandem.frontend.catalog import Catalog
from tandem.router.policy import Router
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import TandemError
from tandem.runtime.events import Events
from tandem.runtime.messages import KvEvent, LoadReport
from tandem.runtime.request_plane import RequestClient

logger = logging.getLogger(__name__)

_SNAPSHOT_TIMEOUT_S = 10.0
_PAUSE_AFTER_FAILURE_S = 1.0
_MAX_BUFFERED_EVENTS = 10_000
_decode_kv = msgspec.msgpack.Decoder(KvEvent).decode
_decode_load = msgspec.msgpack.Decoder(LoadReport).decode


class WorkerEvents:
    """Applies events as they come; after a gap asks the worker for all it holds."""

    def __init__(
        self,
        events: Events,
        catalog: Catalog,
        client: RequestClient,
        router: Router,
        namespace: str,
    ) -> None:
        self._events = events
        self._catalog = catalog
        self._client = client
        self._router = router
        self._subject = f"tandem.{namespace}"
        self._known: set[str] = set()
        self._buffers: dict[str, deque[KvEvent]] = {}  # events that came during a resync
        self._resyncs: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Subscribe; instances known already are resynced."""
        await self._events.subscribe(f"{self._subject}.kv.*", self._on_kv)
        await self._events.subscribe(f"{self._subject}.load.*", self._on_load)
        self._catalog.on_instances = self._on_instances
        self._on_instances()

    async def close(self) -> None:
        """Stop what is under way."""
        resyncs = list(self._resyncs)
        for task in resyncs:
            task.cancel()
        await asyncio.gather(*resyncs, return_exceptions=True)

    def _on_instances(self) -> None:
        present = set(self._catalog.instances)
        for gone in self._known - present:
            self._router.remove_instance(gone)
        for new in present - self._known:
            self._resync(new)
        self._known = present

    def _on_load(self, _subject: str, payload: bytes) -> None:
        try:
            report = _decode_load(payload)
        except msgspec.MsgspecError as error:
            logger.warning("dropped a load report: %s", error)
            return
        if report.role == "decode" and report.instance_id in self._known:
            self._router.update_load(report, self._catalog.block_size(report.instance_id))

    def _on_kv(self, _subject: str, payload: bytes) -> None:
        try:
            event = _decode_kv(payload)
        except msgspec.MsgspecError as error:
            logger.warning("dropped a KV event: %s", error)
            return
        if event.instance_id not in self._known:
            return
        buffer = self._buffers.get(event.instance_id)
        if buffer is not None:
            buffer.append(event)
        elif not self._router.index.apply(event):
            self._resync(event.instance_id, event)

    def _resync(self, instance_id: str, event: KvEvent | None = None) -> None:
        self._buffers[instance_id] = deque(
            [] if event is None else [event], maxlen=_MAX_BUFFERED_EVENTS
        )
        task = asyncio.get_running_loop().create_task(self._load_snapshot(instance_id))
        self._resyncs.add(task)
        task.add_done_callback(self._resyncs.discard)

    async def _load_snapshot(self, instance_id: str) -> None:
        """Events that come meanwhile wait in the buffer; the snapshot covers the older of them."""
        instance = self._catalog.instances.get(instance_id)
        try:
            if instance is None:
                return
            async with RequestContext(timeout_s=_SNAPSHOT_TIMEOUT_S) as context:
                answer = await self._client.call(instance.address, "kv_snapshot", b"", context)
            if instance_id in self._known:
                self._router.index.load_snapshot(_decode_kv(answer))
        except (TandemError, msgspec.MsgspecError) as error:
            logger.warning("no KV snapshot of %s: %s", instance_id, error)
            await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)
        finally:
            buffered = self._buffers.pop(instance_id, ())
        for event in buffered:
            if not self._router.index.apply(event):
                self._resync(instance_id, event)
                return
