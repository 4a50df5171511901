"""The KV events that vLLM and SGLang publish over ZeroMQ.

A message has three frames: topic, number (8 bytes, big-endian, without gaps), and a batch in
msgpack, [timestamp, [event, ...], rank]. An event is an array that begins with its kind, or,
from newer vLLMs, a map of the same fields by name, with the kind as `type`:
    ["BlockStored", hashes, parent hash, token ids, block size, lora id, medium, lora name, keys]
    ["BlockRemoved", hashes, medium]
    ["AllBlocksCleared"]
Fields at the end may be missing, and newer ones are ignored.
"""

import logging
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tandem.runtime.errors import ConfigError, InvalidRequestError, ProtocolError
from tandem.runtime.extras import install_command
from tandem.runtime.tasks import cancel, keep_running
from tandem.runtime.wire.bounds import Count, Id, Integer, Many, Message, Name, Real, TokenId, Value
from tandem.runtime.wire.decoding import decoder
from tandem.sdk.kv.events import KvEventPublisher

if TYPE_CHECKING:
    import zmq.asyncio

logger = logging.getLogger(__name__)

_MAX_QUEUED_MESSAGES = 100_000
_DEVICE = (None, "GPU")  # prompts are matched with blocks in GPU memory only


class BlockStored(Message, frozen=True, array_like=True, tag=True):
    """The filled blocks of one chain."""

    block_hashes: Many[Integer | Id]
    parent_block_hash: Integer | Id | None
    token_ids: Many[TokenId]
    block_size: Count
    lora_id: Integer | None = None
    medium: Name | None = None
    lora_name: Name | None = None
    extra_keys: Many[Value] | None = None  # hashed beside the tokens, by block


class BlockRemoved(Message, frozen=True, array_like=True, tag=True):
    """Blocks removed from the cache."""

    block_hashes: Many[Integer | Id]
    medium: Name | None = None


class AllBlocksCleared(Message, frozen=True, array_like=True, tag=True):
    """The removal of all blocks."""


class BlockStoredMap(BlockStored, frozen=True, array_like=False, tag="BlockStored"):
    """The filled blocks of one chain, in a map."""


class BlockRemovedMap(BlockRemoved, frozen=True, array_like=False, tag="BlockRemoved"):
    """Blocks removed from the cache, in a map."""


class AllBlocksClearedMap(AllBlocksCleared, frozen=True, array_like=False, tag="AllBlocksCleared"):
    """The removal of all blocks, in a map."""


Event = TypeVar("Event")


class EventBatch(Message, Generic[Event], frozen=True, array_like=True, tag=False):
    """The events of one message, in order."""

    timestamp: Real
    events: Many[Event]
    rank: Integer | None = None


_decode_arrays = decoder(EventBatch[BlockStored | BlockRemoved | AllBlocksCleared])
_decode_maps = decoder(EventBatch[BlockStoredMap | BlockRemovedMap | AllBlocksClearedMap])


def _decode_batch(payload: bytes) -> EventBatch[Any]:
    try:
        return _decode_arrays(payload)
    except ProtocolError:
        return _decode_maps(payload)


class ZmqListener:
    """A subscriber to one engine's socket. After a gap it removes all blocks and starts over."""

    def __init__(self, endpoint: str, topic: str, publisher: KvEventPublisher) -> None:
        self._publisher = publisher
        self._expected: int | None = None
        self._endpoint = endpoint
        self._context, self._socket = _subscribe(endpoint, topic)
        self._task = keep_running("the listener to KV events", self._listen)

    async def close(self) -> None:
        """Stop listening."""
        await cancel(self._task)
        self._socket.close(linger=0)
        self._context.term()

    async def _listen(self) -> None:
        while True:
            self.take(await self._socket.recv_multipart())

    def take(self, frames: list[bytes]) -> None:
        """Publish the events of one message."""
        try:
            _topic, number, payload = frames
            sequence = int.from_bytes(number, "big")
            batch = _decode_batch(payload)
        except (ValueError, ProtocolError) as error:
            self._lost(f"a message is not a batch of KV events: {error}")
            self._expected = None
            return
        if self._expected not in (None, sequence):
            self._lost(f"message {sequence} came in place of {self._expected}")
        self._expected = sequence + 1
        for event in batch.events:
            self._apply(event)

    def _lost(self, reason: str) -> None:
        logger.warning("KV events of %s: %s; starting over", self._endpoint, reason)
        self._publisher.publish_cleared()

    def _apply(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        publisher = self._publisher
        if isinstance(event, AllBlocksCleared):
            publisher.publish_cleared()
        elif event.medium not in _DEVICE:
            return
        elif isinstance(event, BlockRemoved):
            publisher.publish_removed(event.block_hashes)
        elif event.block_size == publisher.kv_block_size and not any(event.extra_keys or ()):
            try:
                publisher.publish_stored(
                    event.token_ids,
                    None,
                    event.block_hashes,
                    event.parent_block_hash,
                    event.lora_name or event.lora_id or 0,
                )
            except InvalidRequestError as error:
                logger.warning("KV events of %s: %s", self._endpoint, error)
        else:  # of another size, or hashed with more than their tokens
            publisher.num_unnamed_blocks += len(event.block_hashes)


def _subscribe(endpoint: str, topic: str) -> "tuple[zmq.asyncio.Context, zmq.asyncio.Socket]":
    try:
        import zmq
        import zmq.asyncio
    except ImportError as error:
        raise ConfigError(
            f"ZmqSource needs pyzmq: {install_command('zmq')}", param="endpoint"
        ) from error
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        context.term()
        raise ConfigError(f"endpoint: {endpoint!r}: {error}", param="endpoint") from error
    return context, socket
