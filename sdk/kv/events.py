"""KV events of an engine: blocks that enter and leave its prefix cache."""

import threading
from collections.abc import Sequence

from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.block_hash import block_hashes as hashes_of
from tandem.sdk.kv.stream import kv_stream
from tandem.sdk.worker.distributed_runtime import Component, Endpoint

EngineHash = int | bytes | str  # an engine's name of a block


class KvEventPublisher:
    """A publisher of one rank's KV events: it maps the engine's hashes to those of routers.

    The engine's own hashes may be anything that is unique among its blocks; routers get hashes of
    the tokens. A block without a certain router hash (its parent was never published, or it is not
    full) is not published: routers may underestimate a worker's cache, never overestimate it.

    Construct one per data-parallel rank, on the event loop. `publish_*` may be called from any
    thread, at any rate, and never wait.
    """

    def __init__(
        self,
        component: Component | Endpoint,
        worker_id: int | str | None = None,
        kv_block_size: int | None = None,
        dp_rank: int = 0,
    ) -> None:
        """Register with the process's event stream.

        `worker_id` may be left out; it must be this process's own. A single number after the
        component is the block size. Raise InvalidRequestError naming the argument.
        """
        if kv_block_size is None and isinstance(worker_id, int):
            worker_id, kv_block_size = None, worker_id
        if kv_block_size is None or kv_block_size < 1:
            raise InvalidRequestError(
                f"kv_block_size: {kv_block_size!r} is not a positive number of tokens",
                param="kv_block_size",
            )
        runtime = component.runtime
        if worker_id not in (None, runtime.instance_id, int(runtime.instance_id, 16)):
            raise InvalidRequestError(
                f"worker_id: {worker_id!r} is not this process, which is {runtime.instance_id!r}",
                param="worker_id",
            )
        self.kv_block_size = kv_block_size
        self.dp_rank = dp_rank
        self.num_unnamed_blocks = 0  # not published
        self._lock = threading.Lock()
        self._names: dict[EngineHash, bytes] = {}  # the engine's hash |-> the router's
        self._stream = kv_stream(runtime)
        self._stream.add_namespace(_namespace(component))

    def publish_stored(
        self,
        token_ids: Sequence[int],
        num_block_tokens: Sequence[int] | None = None,
        block_hashes: Sequence[EngineHash] = (),
        parent_hash: EngineHash | None = None,
        lora_id: int | str = 0,
    ) -> None:
        """Publish a chain of blocks as stored.

        `token_ids` holds their tokens in order, `num_block_tokens` the number of tokens of each
        block (default: `kv_block_size`), `block_hashes` the engine's hashes. `parent_hash` is the
        block before the first one, None at the prompt's start. Raise InvalidRequestError when the
        numbers do not match.
        """
        size = self.kv_block_size
        counts = [size] * len(block_hashes) if num_block_tokens is None else num_block_tokens
        if len(counts) != len(block_hashes) or sum(counts) != len(token_ids):
            raise InvalidRequestError(
                f"token_ids: {len(token_ids)} tokens for {len(block_hashes)} blocks of "
                f"{list(counts)} tokens",
                param="token_ids",
            )
        num_full = next((at for at, count in enumerate(counts) if count != size), len(counts))
        with self._lock:
            parent = None if parent_hash is None else self._names.get(parent_hash)
            if parent_hash is not None and parent is None:
                num_full = 0
            self.num_unnamed_blocks += len(block_hashes) - num_full
            if not num_full:
                return
            names = hashes_of(
                token_ids[: num_full * size], size, adapter=adapter_of(lora_id), parent=parent
            )
            stored, removed = [], []
            for engine_hash, name in zip(block_hashes, names, strict=False):
                before = self._names.get(engine_hash)
                if before == name:
                    continue
                if before is not None:  # the engine has given the hash to another block
                    removed.append(before)
                self._names[engine_hash] = name
                stored.append(name)
            self._stream.change(stored, removed)

    def publish_removed(self, block_hashes: Sequence[EngineHash]) -> None:
        """Publish blocks as removed; ignore those never published."""
        with self._lock:
            names = [self._names.pop(each, None) for each in block_hashes]
            self._stream.change((), [name for name in names if name is not None])

    def publish_cleared(self) -> None:
        """Publish all blocks of the rank as removed, also when it ends."""
        with self._lock:
            removed = list(self._names.values())
            self._names.clear()
            self._stream.change((), removed)

    publish_all_blocks_cleared = shutdown = publish_cleared


def adapter_of(lora_id: int | str) -> str:
    """Return the adapter's part of a block's hash; 0 or "" is the model itself."""
    return str(lora_id) if lora_id else ""


def _namespace(component: Component | Endpoint) -> str:
    return component.address.namespace if isinstance(component, Endpoint) else component.namespace
