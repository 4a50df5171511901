"""The sources of an engine's KV events: its own calls, or its ZeroMQ socket."""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from tandem.runtime.errors import InvalidRequestError
from tandem.sdk.kv.events import KvEventPublisher
from tandem.sdk.kv.zmq import ZmqListener
from tandem.sdk.worker.distributed_runtime import Component, Endpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ZmqSource:
    """Batches of events that an engine publishes at `endpoint`, as "tcp://127.0.0.1:5557".

    `topic` is a prefix of the topics to subscribe to. Needs the `zmq` extra.
    """

    endpoint: str
    topic: str = ""
    dp_rank: int = 0


@dataclass(frozen=True)
class PushSource:
    """Calls of the engine; `on_ready` receives the publisher, once, on the event loop."""

    on_ready: Callable[[KvEventPublisher], None]
    dp_rank: int = 0


KvEventSource = ZmqSource | PushSource


@contextlib.asynccontextmanager
async def kv_publishers(
    target: Component | Endpoint, sources: Sequence[KvEventSource], kv_block_size: int | None
) -> AsyncIterator[list[KvEventPublisher]]:
    """Publish the events of the sources as those of this process, a worker of `target`.

    Yield a publisher per source. At the end their blocks are published as removed. Without a block
    size publish nothing and log a warning. Raise InvalidRequestError when two sources have one
    rank, ConfigError for a wrong ZeroMQ endpoint or a missing `zmq` extra.
    """
    if kv_block_size is None and sources:
        logger.warning("kv_cache_block_size is not set, so no KV events are published")
        sources = ()
    ranks = [source.dp_rank for source in sources]
    if len(set(ranks)) != len(ranks):
        raise InvalidRequestError(
            f"dp_rank: {ranks} are the ranks of {len(ranks)} sources; one source per rank",
            param="dp_rank",
        )
    publishers: list[KvEventPublisher] = []
    async with contextlib.AsyncExitStack() as stack:
        for source in sources:
            publisher = KvEventPublisher(target, None, kv_block_size, source.dp_rank)
            publishers.append(publisher)
            stack.callback(publisher.shutdown)
            if isinstance(source, PushSource):
                source.on_ready(publisher)
            else:
                listener = ZmqListener(source.endpoint, source.topic, publisher)
                stack.push_async_callback(listener.close)
        yield publishers
