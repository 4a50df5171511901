"""KV events of authors' workers and the index that routers build of them."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.router.kv_follower import KvFollower, decode_kv_event
from tandem.router.kv_index import KvIndex
from tandem.runtime.bus.events import kv_subject
from tandem.runtime.errors import InvalidRequestError, UnavailableError
from tandem.runtime.wire.block_hash import block_hashes
from tandem.runtime.wire.cluster_messages import KvEvent
from tandem.runtime.wire.messages import encode
from tandem.sdk import KvEventPublisher, KvIndexer
from tandem.sdk.kv.stream import KvStream, kv_stream
from tests.sdk.kit_pair import Pair
from tests.services import eventually

BLOCK = 4
TOKENS = list(range(100, 116))  # four blocks


async def echo(request: object) -> AsyncIterator[object]:
    yield request


class Routed:
    """A worker that publishes and a caller that follows it."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.who = pair.worker.instance_id
        self.publisher = KvEventPublisher(
            pair.worker.namespace("a").component("b"), kv_block_size=BLOCK
        )
        self.stream: KvStream = kv_stream(pair.worker)
        self.indexer = KvIndexer(pair.caller.namespace("a").component("b"), BLOCK)

    async def score(self, tokens: list[int], lora_id: int | str = 0) -> int:
        scores = (await self.indexer.find_matches_for_request(tokens, lora_id)).scores
        assert scores.keys() <= {self.who}
        return scores.get(self.who, 0)

    async def until(self, num_blocks: int, tokens: list[int] = TOKENS) -> None:
        async with asyncio.timeout(60):
            while await self.score(tokens) != num_blocks:
                await asyncio.sleep(0.005)


@pytest.fixture
async def routed(pair: Pair) -> AsyncIterator[Routed]:
    await pair.serve(echo)
    routed = Routed(pair)
    yield routed
    await routed.indexer.close()


async def test_a_prompt_is_matched_with_what_the_worker_published(routed: Routed) -> None:
    publisher = routed.publisher
    publisher.publish_stored(TOKENS[:8], [4, 4], [11, 12])
    await routed.until(2)
    publisher.publish_stored(TOKENS[8:], None, [b"13", "14"], parent_hash=12)
    await routed.until(4)
    assert await routed.score([*TOKENS[:11], 0]) == 2
    assert await routed.score([0, *TOKENS]) == 0
    assert await routed.score(TOKENS[:7]) == 1 and await routed.score([]) == 0
    publisher.publish_removed([b"13", 99])
    await routed.until(2)
    publisher.publish_cleared()
    await routed.until(0)
    assert routed.indexer.block_size() == BLOCK


async def test_adapters_have_blocks_of_their_own(routed: Routed) -> None:
    routed.publisher.publish_stored(TOKENS, None, [1, 2, 3, 4], lora_id=7)
    async with asyncio.timeout(60):
        while await routed.score(TOKENS, 7) != 4:
            await asyncio.sleep(0.005)
    assert await routed.score(TOKENS) == await routed.score(TOKENS, "other") == 0


async def test_a_late_follower_gets_a_dump(routed: Routed) -> None:
    routed.publisher.publish_stored(TOKENS, None, [1, 2, 3, 4])
    await routed.until(4)
    late = KvIndexer(routed.pair.caller.namespace("a").component("b"), BLOCK)
    assert (await late.find_matches_for_request(TOKENS)).scores == {routed.who: 4}
    assert (await late.find_matches(block_hashes(TOKENS, BLOCK))).scores == {routed.who: 4}
    await late.close()


async def test_a_lost_event_is_noticed_and_healed_by_a_dump(routed: Routed) -> None:
    publisher, stream = routed.publisher, routed.stream
    publisher.publish_stored(TOKENS[:8], None, [1, 2])
    await routed.until(2)
    events, sent = routed.pair.worker.events, []
    publish = events.publish
    events.publish = lambda subject, payload: sent.append(subject)  # type: ignore[method-assign]
    publisher.publish_removed([2])
    await eventually(lambda: len(sent) == 1)
    events.publish = publish  # type: ignore[method-assign]
    assert await routed.score(TOKENS) == 2  # the loss is not noticed yet
    publisher.publish_stored([0] * 4, None, [50])
    await routed.until(1)
    await routed.until(1, [0] * 4)
    assert stream.snapshot().event_id == 3


async def test_a_lost_last_event_is_noticed_by_the_heartbeat(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.sdk.kv.stream.HEARTBEAT_S", 0.05)
    await pair.serve(echo)
    routed = Routed(pair)
    routed.publisher.publish_stored(TOKENS, None, [1, 2, 3, 4])
    await routed.until(4)
    events, sent = pair.worker.events, []
    publish = events.publish
    events.publish = lambda subject, payload: sent.append(subject)  # type: ignore[method-assign]
    routed.publisher.publish_cleared()
    await eventually(lambda: bool(sent))

    def sent_on(subject: str, payload: bytes) -> None:
        sent.append(subject)
        publish(subject, payload)

    events.publish = sent_on  # type: ignore[method-assign]
    await routed.until(0)
    await eventually(lambda: len(sent) > 1)
    await routed.indexer.close()


async def test_a_worker_that_leaves_is_forgotten(routed: Routed) -> None:
    routed.publisher.publish_stored(TOKENS, None, [1, 2, 3, 4])
    await routed.until(4)
    routed.pair.worker.shutdown()
    await routed.until(0)


async def test_blocks_that_cannot_be_named_are_not_published(routed: Routed) -> None:
    publisher = routed.publisher
    publisher.publish_stored(TOKENS[4:8], None, [2], parent_hash=1)  # 1 was never published
    publisher.publish_stored(TOKENS[:6], [4, 2], [1, 5])  # 5 is not full
    assert publisher.num_unnamed_blocks == 2
    publisher.publish_stored(TOKENS[6:10], None, [6], parent_hash=5)
    await routed.until(1)
    assert publisher.num_unnamed_blocks == 3


async def test_a_block_is_removed_with_the_last_rank_that_holds_it(routed: Routed) -> None:
    component = routed.pair.worker.namespace("a").component("b")
    other_rank = KvEventPublisher(component, kv_block_size=BLOCK, dp_rank=1)
    for _ in range(2):  # told twice, held once
        routed.publisher.publish_stored(TOKENS, None, [1, 2, 3, 4])
    routed.publisher.publish_stored(TOKENS[:4], None, [21])  # the same block again
    other_rank.publish_stored(TOKENS[:8], None, [1, 2])
    routed.publisher.publish_removed([1])
    other_rank.publish_stored([9] * 4, None, [9])
    await routed.until(1, [9] * 4)
    assert await routed.score(TOKENS) == 4
    other_rank.shutdown()
    await routed.until(0, [9] * 4)
    assert await routed.score(TOKENS) == 4
    routed.publisher.publish_removed([21])
    await routed.until(0)


async def test_an_engines_hash_may_come_to_mean_another_block(routed: Routed) -> None:
    routed.publisher.publish_stored(TOKENS[:4], None, [1])
    routed.publisher.publish_stored([7] * 4, None, [1])
    await routed.until(1, [7] * 4)
    assert await routed.score(TOKENS) == 0


async def test_threads_may_publish_at_once(routed: Routed) -> None:
    publisher = routed.publisher

    def work(number: int) -> None:
        for turn in range(100):
            tokens = [number, turn, 0, 0]
            publisher.publish_stored(tokens, None, [(number << 32) + turn])
            if turn % 2:
                publisher.publish_removed([(number << 32) + turn])

    with ThreadPoolExecutor(4) as pool:
        await asyncio.gather(
            *(asyncio.get_running_loop().run_in_executor(pool, work, each) for each in range(4))
        )
    for number in range(4):
        await routed.until(1, [number, 98, 0, 0])
        await routed.until(0, [number, 99, 0, 0])
    assert len(routed.stream.snapshot().stored) == 200


async def test_arguments_that_do_not_fit_are_named(routed: Routed) -> None:
    component = routed.pair.worker.namespace("a").component("b")
    endpoint = component.endpoint("c")
    assert KvEventPublisher(endpoint, 16).kv_block_size == 16
    mine = routed.pair.worker.instance_id
    assert KvEventPublisher(component, mine, 8).kv_block_size == 8
    assert KvEventPublisher(component, int(mine, 16), 8, 1).dp_rank == 1
    for arguments, name in (
        ((component,), "kv_block_size"),
        ((component, 0), "kv_block_size"),
        ((component, 5, 16), "worker_id"),
    ):
        with pytest.raises(InvalidRequestError, match=name):
            KvEventPublisher(*arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="token_ids: 3 tokens for 1 blocks"):
        routed.publisher.publish_stored([1, 2, 3], None, [1])
    with pytest.raises(InvalidRequestError, match="block_size"):
        KvIndexer(component, 0)
    with pytest.raises(InvalidRequestError, match="tokens"):
        await routed.indexer.find_matches_for_request([-1] * 4)


async def test_an_indexer_is_bounded(routed: Routed) -> None:
    small = KvIndexer(routed.pair.caller.namespace("a").component("b"), BLOCK, max_entries=3)
    routed.publisher.publish_stored(TOKENS, None, [1, 2, 3, 4])
    await routed.until(4)
    async with asyncio.timeout(60):
        while (await small.find_matches_for_request(TOKENS)).scores != {routed.who: 3}:
            await asyncio.sleep(0.005)
    await small.close()


_STEPS = st.lists(
    st.tuples(
        st.sets(st.integers(0, 7), max_size=3),
        st.sets(st.integers(0, 7), max_size=3),
        st.sampled_from(["arrives", "arrives", "is lost", "arrives, with a dump"]),
    ),
    max_size=20,
)


@settings(max_examples=50)
@given(_STEPS, st.booleans())
def test_whatever_is_lost_a_follower_is_right_after_the_next_event_or_holds_less(
    steps: list[tuple[set[int], set[int], str]], does_dump: bool
) -> None:
    hashes = [bytes([each]) * 16 for each in range(8)]

    async def run() -> None:
        held: set[int] = set()
        event_id = 0

        async def dump(instance_id: str) -> bytes:
            if not does_dump:
                raise UnavailableError("gone")
            stored = [hashes[each] for each in held]
            return encode(KvEvent(instance_id, "e", event_id, stored, cleared=True))

        follower = KvFollower(KvIndex(100), dump)
        follower.add("w")
        follower.add("w")
        for stored, removed, how in steps:
            held = (held - removed) | stored
            event_id += 1
            event = KvEvent(
                "w", "e", event_id, [hashes[i] for i in stored], [hashes[i] for i in removed]
            )
            if how == "is lost":
                continue
            follower.on_event("kv.w", encode(event))
            follower.on_event("kv.w", encode(KvEvent("stranger", "e", 1, hashes)))
            follower.on_event("kv.stranger", encode(KvEvent("stranger", "e", 1, hashes)))
            if how == "arrives, with a dump" and does_dump:
                await follower.settled(1.0)
                assert follower.index.num_entries == len(held)
            assert follower.index.match(hashes, ["stranger"]) == {}
            for each in range(8):
                depth = follower.index.match([hashes[each]]).get("w", 0)
                assert depth <= (each in held)
        follower.on_event("kv.w", b"no event")
        follower.remove("w")
        assert follower.index.num_entries == 0
        await follower.close()

    asyncio.run(run())


async def test_events_are_on_the_subject_of_the_endpoints_namespace(routed: Routed) -> None:
    seen: list[KvEvent] = []
    await routed.pair.caller.events.subscribe(
        kv_subject("a", routed.who), lambda _, payload: seen.append(decode_kv_event(payload))
    )
    async with asyncio.timeout(60):
        while not seen:
            routed.publisher.publish_cleared()
            await asyncio.sleep(0.01)
            routed.publisher.publish_stored(TOKENS, None, [1, 2, 3, 4])
            await asyncio.sleep(0.01)
    assert seen[0].instance_id == routed.who
    assert routed.stream.snapshot().stored == block_hashes(TOKENS, BLOCK)
