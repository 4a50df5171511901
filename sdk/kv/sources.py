"""Where an engine's KV events come from: its own calls, or the ZeroMQ socket it publishes on."""

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
    """The engine publishes batches of events at `endpoint`, as "tcp://127.0.0.1:5557".

    `topic` is the beginning of the topics to listen to. Needs the `zmq` extra.
    """

    endpoint: str
    topic: str = ""
    dp_rank: int = 0


@dataclass(frozen=True)
class PushSource:
    """The engine calls a publisher itself; `on_ready` hands it over, once, on the event loop."""

    on_ready: Callable[[KvEventPublisher], None]
    dp_rank: int = 0


KvEventSource = ZmqSource | PushSource


class KvSources:
    """The open sources of one engine; `close` ends them."""

    def __init__(self) -> None:
        self.publishers: list[KvEventPublisher] = []
        self._listeners: list[ZmqListener] = []

    def _add(self, target: Component | Endpoint, source: KvEventSource, block_size: int) -> None:
        publisher = KvEventPublisher(target, kv_block_size=block_size, dp_rank=source.dp_rank)
        self.publishers.append(publisher)
        if isinstance(source, PushSource):
            source.on_ready(publisher)
        else:
            self._listeners.append(ZmqListener(source.endpoint, source.topic, publisher))

    async def close(self) -> None:
        """Stop listening; what the engine held is published as gone."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            await listener.close()
        for publisher in self.publishers:
            publisher.shutdown()


async def open_kv_sources(
    target: Component | Endpoint,
    sources: Sequence[KvEventSource],
    kv_block_size: int | None,
) -> KvSources:
    """Publish what the sources tell as the KV events of this process, a worker of `target`.

    Without a block size nothing can be published, and a warning says so. Raises
    InvalidRequestError where two sources have one rank, ConfigError where a ZeroMQ source's
    endpoint is none or the `zmq` extra is not installed.
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
            opened._add(target, source, kv_block_size)
    except BaseException:
        await opened.close()
        raise
    return opened
