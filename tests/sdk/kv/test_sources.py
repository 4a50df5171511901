"""Engines' own KV events, over ZeroMQ and by calls."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest

from tandem.runtime.errors import ConfigError, InvalidRequestError
from tandem.runtime.wire.block_hash import block_hashes
from tandem.sdk import KvEventPublisher, PushSource, ZmqSource
from tandem.sdk.kv.sources import kv_publishers
from tandem.sdk.kv.stream import kv_stream
from tandem.sdk.kv.zmq import ZmqListener
from tests.sdk.kit_pair import Pair
from tests.services import eventually

BLOCK = 4
TOKENS = list(range(12))
NAMES = block_hashes(TOKENS, BLOCK)


class Engine:
    """The publishing side, as an engine has it."""

    def __init__(self) -> None:
        zmq = pytest.importorskip("zmq")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.sequence = 0

    def subscribed(self) -> None:
        """Waits until somebody listens."""
        assert self._socket.poll(10_000), "no subscriber"
        self._socket.recv()

    def send(self, *events: list[Any] | dict[str, Any], topic: bytes = b"kv") -> None:
        payload = msgspec.msgpack.encode([0.5, list(events), 0])
        self.send_raw(self.sequence.to_bytes(8, "big"), payload, topic)

    def send_raw(self, number: bytes, payload: bytes, topic: bytes = b"kv") -> None:
        self._socket.send_multipart([topic, number, payload])
        self.sequence += 1

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


def stored(
    tokens: list[int], hashes: list[int | bytes], parent: Any = None, *more: Any
) -> list[Any]:
    return ["BlockStored", hashes, parent, tokens, BLOCK, *more]


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


async def held(pair: Pair, names: list[bytes]) -> None:
    await eventually(lambda: set(kv_stream(pair.worker).snapshot().stored) == set(names))


@pytest.fixture
async def listening(pair: Pair, engine: Engine) -> AsyncIterator[Pair]:
    component = pair.worker.namespace("a").component("b")
    async with kv_publishers(component, [ZmqSource(engine.endpoint, "kv")], BLOCK):
        await asyncio.to_thread(engine.subscribed)
        yield pair
    await held(pair, [])


async def test_an_engines_batches_become_our_events(listening: Pair, engine: Engine) -> None:
    engine.send(stored(TOKENS[:8], [-1, 2], None, None, "GPU"), stored(TOKENS[8:], [b"3"], 2))
    await held(listening, NAMES)
    engine.send(["BlockRemoved", [b"3"], "GPU", "a field of the future"])
    await held(listening, NAMES[:2])
    engine.send(["AllBlocksCleared"])
    await held(listening, [])


async def test_events_may_be_maps_as_newer_vllms_publish_them(
    listening: Pair, engine: Engine
) -> None:
    blocks = {
        "type": "BlockStored", "block_hashes": [b"1", b"2"], "parent_block_hash": None,
        "token_ids": TOKENS[:8], "block_size": BLOCK, "lora_id": None, "medium": "GPU",
        "lora_name": None, "session_id": "a field of the future",
    }  # fmt: skip
    engine.send(blocks)
    await held(listening, NAMES[:2])
    engine.send({"type": "BlockRemoved", "block_hashes": [b"2"], "medium": "GPU"})
    await held(listening, NAMES[:1])
    engine.send({"type": "AllBlocksCleared"})
    await held(listening, [])


async def test_other_topics_media_and_sizes_are_left_alone(listening: Pair, engine: Engine) -> None:
    engine.send(stored([5] * 4, [50]), topic=b"other")
    engine.sequence -= 1
    engine.send(
        stored(TOKENS[:4], [1]),
        stored([6] * 4, [60], None, None, "CPU"),
        ["BlockRemoved", [1], "CPU"],
        ["BlockStored", [70], None, [7] * 8, 8],
        stored([8] * 4, [80], None, None, "GPU", None, [["an image"]]),
        stored([9] * 4, [90, 91]),  # tokens of one block for two
        stored(TOKENS[4:8], [2], 1, None, "GPU", None, [None]),
    )
    await held(listening, NAMES[:2])


async def test_adapters_are_part_of_the_name(listening: Pair, engine: Engine) -> None:
    engine.send(stored(TOKENS[:4], [1], None, 3), stored(TOKENS[:4], [2], None, 3, "GPU", "mine"))
    await held(
        listening, [block_hashes(TOKENS[:4], BLOCK, adapter=each)[0] for each in ("3", "mine")]
    )


async def test_a_gap_clears_what_may_be_wrong_now(listening: Pair, engine: Engine) -> None:
    engine.send(stored(TOKENS[:8], [1, 2]))
    await held(listening, NAMES[:2])
    engine.sequence += 1  # a message that never came
    engine.send(stored(TOKENS[8:], [3], 2), stored([9] * 4, [9]))
    await held(listening, block_hashes([9] * 4, BLOCK))


async def test_what_is_no_batch_clears_too_and_the_next_one_counts(
    listening: Pair, engine: Engine
) -> None:
    engine.send(stored(TOKENS[:8], [1, 2]))
    await held(listening, NAMES[:2])
    engine.send_raw(bytes(8), msgspec.msgpack.encode([0.5, [["NewEvent", 1]]]))
    await held(listening, [])
    engine.send(stored(TOKENS[:4], [1]))
    await held(listening, NAMES[:1])


async def test_an_engine_may_push_itself(pair: Pair) -> None:
    given: list[KvEventPublisher] = []
    endpoint = pair.worker.endpoint("a.b.generate")
    async with kv_publishers(endpoint, [PushSource(given.append, dp_rank=2)], BLOCK) as publishers:
        assert [each.dp_rank for each in publishers] == [2] and given == publishers
        given[0].publish_stored(TOKENS, None, [1, 2, 3])
        await held(pair, NAMES)
    await held(pair, [])


async def test_without_a_block_size_nothing_is_published(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = pair.worker.endpoint("a.b.generate")
    async with kv_publishers(endpoint, [PushSource(lambda _: None)], None) as publishers:
        assert publishers == [] and "kv_cache_block_size" in caplog.text


async def test_sources_that_cannot_be_opened_are_named(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("zmq")
    endpoint = pair.worker.endpoint("a.b.generate")
    twice = [PushSource(lambda _: None), PushSource(lambda _: None)]
    with pytest.raises(InvalidRequestError, match="dp_rank"):
        async with kv_publishers(endpoint, twice, BLOCK):
            pass
    with pytest.raises(ConfigError, match="endpoint: 'nowhere'"):
        async with kv_publishers(endpoint, [ZmqSource("nowhere")], BLOCK):
            pass
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match="pyzmq"):
        ZmqListener("tcp://127.0.0.1:1", "", KvEventPublisher(endpoint, BLOCK))
