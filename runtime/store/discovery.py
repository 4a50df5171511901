"""The processes that live and the live config: a key-value store with leases and views.

    /tandem/{namespace}/instances/{component}/{endpoint}/{instance_id}    Instance
    /tandem/{namespace}/models/{model}/{instance_id}                      ModelCard
    /tandem/{namespace}/transfer/{instance_id}                            TransferMetadata
    /tandem/{namespace}/config/{section.key}                              JSON value, no lease

Values are JSON, with a MAC behind them where there is a cluster token (`seals.py`).
`tandem.runtime.store.etcd` is the store of a cluster, `MemoryDiscovery` one in memory.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar
from urllib.parse import quote

import msgspec

from tandem.runtime.address import EndpointAddress
from tandem.runtime.errors import ConfigError, DeadlineError, ProtocolError
from tandem.runtime.listeners import Listeners
from tandem.runtime.wire.bounds import Message
from tandem.runtime.wire.cluster_messages import Instance, ModelCard, TransferMetadata
from tandem.runtime.wire.decoding import Decode, json_decoder

decode_instance = json_decoder(Instance)
decode_card = json_decoder(ModelCard)

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Message)
Change = Callable[[str, bytes | None], None]  # key, its value; None: deleted


class WatchView:
    """A live mirror of the keys under a prefix; it keeps them while the store is away."""

    def __init__(self, prefix: str, on_close: Callable[["WatchView"], None]) -> None:
        self.prefix = prefix
        self._items: dict[str, bytes] = {}
        self.items: Mapping[str, bytes] = MappingProxyType(self._items)
        self._listeners: Listeners[str, bytes | None] = Listeners()
        self._is_ready = asyncio.Event()
        self._on_close = on_close

    async def ready(self) -> None:
        """Wait until the first snapshot of the store has arrived."""
        await self._is_ready.wait()

    def subscribe(self, change: Change) -> Callable[[], None]:
        """Call `change` for every known key and each later change; return the undo function."""
        remove = self._listeners.add(change)
        for key, value in list(self._items.items()):
            change(key, value)
        return remove

    async def wait_for(
        self, predicate: Callable[[Mapping[str, bytes]], bool], timeout_s: float
    ) -> None:
        """Wait until `predicate(items)` holds. Raise DeadlineError after `timeout_s`."""
        changed = asyncio.Event()
        undo = self.subscribe(lambda key, value: changed.set())
        try:
            async with asyncio.timeout(timeout_s):
                while not predicate(self.items):
                    changed.clear()
                    await changed.wait()
        except TimeoutError as error:
            raise DeadlineError(
                f"the awaited state of {self.prefix} did not come within {timeout_s:g} s"
            ) from error
        finally:
            undo()

    async def close(self) -> None:
        """Stop following."""
        self._listeners.clear()
        self._on_close(self)

    def apply(self, key: str, value: bytes | None) -> None:
        """Take over a change of the store; an equal value is not reported."""
        if self._items.get(key) == value:
            return
        if value is None:
            del self._items[key]
        else:
            self._items[key] = value
        self._listeners.tell(key, value)

    def mark_ready(self) -> None:
        """Note that the first snapshot of the store has been applied."""
        self._is_ready.set()


class Records(Protocol):
    """A place for records that live as long as this process: discovery, or a node."""

    async def put(self, key: str, value: bytes) -> None:
        """Keep `key` in the store for as long as this process lives, across losses of the store."""
        ...


class Discovery(Records, Protocol):
    """The access of one process to the store that all processes share."""

    @property
    def connected(self) -> bool:
        """True when the store answered the last request."""
        ...

    async def start(self) -> None:
        """Connect. Raise ServiceError naming the address after bounded retries."""
        ...

    async def delete(self, key: str) -> None:
        """Delete a key."""
        ...

    async def put_config(self, key: str, value: bytes) -> None:
        """Set a key that outlives this process. Raise ServiceError when the store is away."""
        ...

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        """Return the keys under a prefix. Raise ServiceError when the store is away."""
        ...

    def watch(self, prefix: str) -> WatchView:
        """Follow a prefix."""
        ...

    async def close(self) -> None:
        """Leave the store: every key that was `put` here disappears at once."""
        ...


class MemoryStore:
    """The store that MemoryDiscovery objects of one process share."""

    def __init__(self) -> None:
        self.items: dict[str, bytes] = {}
        self.views: set[WatchView] = set()

    def set(self, key: str, value: bytes | None) -> None:
        """Change a key (None: delete it) in the store and in the views."""
        if value is None:
            self.items.pop(key, None)
        else:
            self.items[key] = value
        for view in list(self.views):
            if key.startswith(view.prefix):
                view.apply(key, value)


class MemoryDiscovery:
    """Discovery within one process; those with one store see one another."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self._store = store or MemoryStore()
        self._own: set[str] = set()
        self.connected = False

    async def start(self) -> None:
        self.connected = True

    async def put(self, key: str, value: bytes) -> None:
        self._own.add(key)
        self._store.set(key, value)

    async def delete(self, key: str) -> None:
        self._own.discard(key)
        self._store.set(key, None)

    async def put_config(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, value in self._store.items.items() if key.startswith(prefix)}

    def watch(self, prefix: str) -> WatchView:
        view = WatchView(prefix, self._store.views.discard)
        self._store.views.add(view)
        for key, value in self._store.items.items():
            if key.startswith(prefix):
                view.apply(key, value)
        view.mark_ready()
        return view

    async def close(self) -> None:
        for key in self._own:
            self._store.set(key, None)
        self._own.clear()
        self.connected = False


class TypedView(Generic[T]):
    """A decoded WatchView: the last `num_parts` parts of the key |-> the value.

    The last part is an instance id. A value that is no message of `kind` is logged and ignored.
    """

    def __init__(self, view: WatchView, kind: type[T], num_parts: int = 1) -> None:
        self._view = view
        self._num_parts = num_parts
        self._decode = json_decoder(kind)
        self._items: dict[str, T] = {}
        self._listeners: Listeners[str, T | None] = Listeners()
        self.items: Mapping[str, T] = MappingProxyType(self._items)
        view.subscribe(self._apply)

    def _apply(self, key: str, data: bytes | None) -> None:
        name = "/".join(key.rsplit("/", self._num_parts)[1:])
        value = None
        if data is not None:
            try:
                value = self._decode(data)
            except ProtocolError as error:
                logger.warning("ignoring %s: %s", key, error)
                return
        if value is None:
            self._items.pop(name, None)
        else:
            self._items[name] = value
        self._listeners.tell(name, value)

    async def ready(self) -> None:
        """Wait until the first snapshot of the store has arrived."""
        await self._view.ready()

    def subscribe(self, change: Callable[[str, T | None], None]) -> Callable[[], None]:
        """Call `change` for every known item and each later change; return the undo function."""
        remove = self._listeners.add(change)
        for name, value in list(self._items.items()):
            change(name, value)
        return remove

    async def wait_for(
        self, predicate: Callable[[Mapping[str, T]], bool], timeout_s: float
    ) -> None:
        """Wait until `predicate(items)` holds. Raise DeadlineError after `timeout_s`."""
        await self._view.wait_for(lambda _: predicate(self.items), timeout_s)

    async def close(self) -> None:
        """Stop following."""
        self._listeners.clear()
        await self._view.close()


# ---- keys -------------------------------------------------------------------------------------


def instances_prefix(namespace: str, component: str = "") -> str:
    """Return the prefix of all instances, or of those of one component."""
    return f"/tandem/{namespace}/instances/" + (f"{component}/" if component else "")


def models_prefix(namespace: str, model: str = "") -> str:
    """Return the prefix of all model cards, or of those of one model."""
    return f"/tandem/{namespace}/models/" + (f"{quote(model, safe='')}/" if model else "")


def model_key(namespace: str, model: str, instance_id: str) -> str:
    """Return the key of a worker's card for a model, whose name is percent-encoded."""
    return models_prefix(namespace, model) + instance_id


def transfer_prefix(namespace: str) -> str:
    """Return the prefix of the transfer metadata of all workers."""
    return f"/tandem/{namespace}/transfer/"


def config_prefix(namespace: str, model: str = "") -> str:
    """Return the prefix of all live config values, or of those of one model alone."""
    return f"/tandem/{namespace}/config/" + (f"{quote(model, safe='')}/" if model else "")


def config_key(namespace: str, name: str, model: str = "") -> str:
    """Return the key of a live config value, `name` as in "disagg.max_local_prefill_length".

    A model's own value goes before that of the whole namespace.
    """
    section, dot, field = name.partition(".")
    if not (section and dot and field) or "/" in name:
        raise ConfigError(f"{name!r} is not section.key")
    return config_prefix(namespace, model) + name


# ---- records ----------------------------------------------------------------------------------


def endpoint_of(instance: Instance) -> str:
    """Return the name of the instance's endpoint on its request plane."""
    return f"{instance.namespace}.{instance.component}.{instance.endpoint}"


async def register_instance(records: Records, instance: Instance) -> str:
    """Put the record of an instance and return its key."""
    address = EndpointAddress(instance.namespace, instance.component, instance.endpoint)
    key = address.instance_key(instance.instance_id)
    await records.put(key, msgspec.json.encode(instance))
    return key


async def register_model(records: Records, namespace: str, card: ModelCard) -> str:
    """Put the card of a model that `card.instance_id` serves and return its key."""
    key = model_key(namespace, card.name, card.instance_id)
    await records.put(key, msgspec.json.encode(card))
    return key


async def register_transfer(records: Records, namespace: str, metadata: TransferMetadata) -> str:
    """Put how to reach a worker's KV pools and return the key."""
    key = transfer_prefix(namespace) + metadata.instance_id
    await records.put(key, msgspec.json.encode(metadata))
    return key


def readable(records: Iterable[bytes], decode: Decode[T]) -> list[T]:
    """Return the records that `decode` takes; those of strangers are left out."""
    found = []
    for record in records:
        with contextlib.suppress(ProtocolError):
            found.append(decode(record))
    return found


async def read_instances(
    discovery: Discovery, namespace: str, components: Iterable[str]
) -> dict[str, Instance]:
    """Return instance id |-> Instance of some components; of a process its first endpoint."""
    found: dict[str, Instance] = {}
    for component in components:
        records = await discovery.get_prefix(instances_prefix(namespace, component))
        for instance in readable(records.values(), decode_instance):
            found.setdefault(instance.instance_id, instance)
    return found


def watch_instances(discovery: Discovery, namespace: str, component: str) -> TypedView[Instance]:
    """Follow instance id |-> Instance, of all endpoints of a component."""
    return TypedView(discovery.watch(instances_prefix(namespace, component)), Instance)


def watch_endpoint(discovery: Discovery, address: EndpointAddress) -> TypedView[Instance]:
    """Follow instance id |-> Instance, of one endpoint."""
    return TypedView(discovery.watch(address.key_prefix()), Instance)


def watch_models(discovery: Discovery, namespace: str) -> TypedView[ModelCard]:
    """Follow "model/instance id" |-> card; the model's name is percent-encoded."""
    return TypedView(discovery.watch(models_prefix(namespace)), ModelCard, num_parts=2)


def watch_transfer(discovery: Discovery, namespace: str) -> TypedView[TransferMetadata]:
    """Follow instance id |-> TransferMetadata."""
    return TypedView(discovery.watch(transfer_prefix(namespace)), TransferMetadata)
