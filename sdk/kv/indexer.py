"""The prefix caches of a component's workers, for custom routers."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from tandem.router.kv_follower import KvFollower
from tandem.router.kv_index import KvIndex
from tandem.runtime.bus.events import kv_subject
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import InvalidRequestError, UnavailableError
from tandem.runtime.store.discovery import TypedView, instances_prefix
from tandem.runtime.tasks import cancel
from tandem.runtime.wire.block_hash import block_hashes
from tandem.runtime.wire.cluster_messages import Instance
from tandem.sdk.kv.events import adapter_of
from tandem.sdk.kv.stream import SNAPSHOT_ENDPOINT
from tandem.sdk.worker.distributed_runtime import Component

MAX_ENTRIES = 4_000_000
_DUMP_TIMEOUT_S = 10.0
_FIRST_DUMPS_S = 1.0  # a first answer waits this long for slow dumps


@dataclass(frozen=True, slots=True)
class OverlapScores:
    """Worker (instance id) |-> number of leading blocks of the prompt in its cache, if any."""

    scores: dict[str, int] = field(default_factory=dict)


class KvIndexer:
    """An index of the KV events of all workers of a component, active once constructed.

    It never counts a block that a worker has not published. After a worker's events were lost,
    its cache counts as empty until its dump has arrived. Construct it on the event loop; `close`
    stops it.
    """

    def __init__(
        self, component: Component, block_size: int, *, max_entries: int = MAX_ENTRIES
    ) -> None:
        """Keep at most `max_entries` (block, worker) pairs, about 130 bytes each."""
        for name, value in (("block_size", block_size), ("max_entries", max_entries)):
            if value < 1:
                raise InvalidRequestError(f"{name}: {value} is below 1", param=name)
        self._block_size = block_size
        self._runtime = component.runtime
        self._component = component
        self._addresses: dict[str, str] = {}
        self._endpoints: dict[str, set[str]] = {}  # instance |-> its endpoints
        self._follower = KvFollower(KvIndex(max_entries), self._dump)
        prefix = instances_prefix(component.namespace, component.name)
        self._view = TypedView(self._runtime.discovery.watch(prefix), Instance, num_parts=2)
        self._stack = AsyncExitStack()
        self._stack.push_async_callback(self._follower.close)
        self._stack.push_async_callback(self._view.close)
        self._starting = asyncio.get_running_loop().create_task(self._start())

    def block_size(self) -> int:
        """Return the number of tokens of a block."""
        return self._block_size

    async def find_matches_for_request(
        self, tokens: Sequence[int], lora_id: int | str = 0
    ) -> OverlapScores:
        """Return the number of a prompt's blocks in each worker's cache, from its start.

        Raise InvalidRequestError for wrong token ids, ServiceError when the cluster could not be
        reached.
        """
        try:
            hashes = block_hashes(tokens, self._block_size, adapter=adapter_of(lora_id))
        except (TypeError, OverflowError) as error:
            raise InvalidRequestError(f"tokens: {error}", param="tokens") from error
        return await self.find_matches(hashes)

    async def find_matches(self, hashes: Sequence[bytes]) -> OverlapScores:
        """Return the same for hashed blocks (`tandem.runtime.wire.block_hash`)."""
        await asyncio.shield(self._starting)
        return OverlapScores(self._follower.index.match(hashes))

    async def close(self) -> None:
        """Stop following."""
        await cancel(self._starting)
        await self._stack.aclose()

    async def _start(self) -> None:
        subject, events = kv_subject(self._component.namespace), self._runtime.events
        self._stack.push_async_callback(await events.subscribe(subject, self._follower.on_event))
        await self._view.ready()
        self._view.subscribe(self._on_instance)
        await self._follower.settled(_FIRST_DUMPS_S)

    def _on_instance(self, name: str, instance: Instance | None) -> None:
        endpoint, _, instance_id = name.rpartition("/")
        endpoints = self._endpoints.setdefault(instance_id, set())
        if instance is None:
            endpoints.discard(endpoint)
        else:
            endpoints.add(endpoint)
            self._addresses[instance_id] = instance.address
        if endpoints:
            self._follower.add(instance_id)
        else:
            del self._endpoints[instance_id]
            self._addresses.pop(instance_id, None)
            self._follower.remove(instance_id)

    async def _dump(self, instance_id: str) -> bytes:
        address = self._addresses.get(instance_id)
        if address is None:
            raise UnavailableError(f"{instance_id} is gone")
        async with RequestContext(timeout_s=_DUMP_TIMEOUT_S) as context:
            return await self._runtime.client.call(address, SNAPSHOT_ENDPOINT, b"", context)
