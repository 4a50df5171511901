"""The sources of an engine's KV events: its own calls, or its ZeroMQ socket."""

import logging
from collections.abc import Callable, Sequence
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


class KvSources:
    """The open sources of one engine."""

    def __init__(self) -> None:
        self.publishers: list[KvEventPublisher] = []
        self._listeners: list[ZmqListener] = []

    def open(self, source: KvEventSource, publisher: KvEventPublisher) -> None:
        """Publish the events of a source."""
        self.publishers.append(publisher)
        if isinstance(source, PushSource):
            source.on_ready(publisher)
        else:
            self._listeners.append(ZmqListener(source.endpoint, source.topic, publisher))

    async def close(self) -> None:
        """Stop listening; publish the engine's blocks as removed."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            await listener.close()
        for publisher in self.publishers:
            publisher.shutdown()


async def open_kv_sources(
    target: Component | Endpoint, sources: Sequence[KvEventSource], kv_block_size: int | None
) -> KvSources:
    """Publish the events of the sources as those of this process, a worker of `target`.

    Without a block size publish nothing and log a warning. Raise InvalidRequestError when two
    sources have one rank, ConfigError for a wrong ZeroMQ endpoint or a missing `zmq` extra.
    """
    opened = KvSources()
    if kv_block_size is None:
        if sources:
            logger.warning("kv_cache_block_size is not set, so no KV events are published")
        return opened
    ranks = [source.dp_rank for source in sources]
    if len(set(ranks)) != len(ranks):
        raise InvalidRequestError(
            f"dp_rank: {ranks} are the ranks of {len(ranks)} sources; one source per rank",
            param="dp_rank",
        )
    try:
        for source in sources:
            opened.open(source, KvEventPublisher(target, None, kv_block_size, source.dp_rank))
    except BaseException:
        await opened.close()
        raise
    return opened
