"""Two members of a cluster, one with tickets and one that takes them, without vLLM.

A fake engine computes prompts: it fills blocks of the prefill side's pool, and reports its steps.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import torch

from tandem.decode.config import DisaggConfig
from tandem.prefill.config import PrefillConfig
from tandem.queue.config import QueueConfig
from tandem.runtime.address import new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import InternalError
from tandem.runtime.plane.server import RequestServer, Responder
from tandem.runtime.store.discovery import config_key
from tandem.runtime.wire.handoff_messages import Ack
from tandem.runtime.wire.messages import encode, unpack_tokens
from tandem.transfer.config import TransferConfig
from tandem.transfer.handoff.receiver import HandoffReceiver
from tandem.transfer.layout import KvLayout, RankPair
from tandem.vllm.kv_layout import VllmPool
from tandem.vllm.member import Member
from tandem.vllm.settings import ConnectorConfig, ConnectorSettings
from tandem.vllm.step_messages import (
    COMPUTE,
    ComputePrompt,
    Ends,
    LoadEnd,
    Offer,
    Orders,
    Progress,
    Released,
)
from tests.services import EtcdServer, NatsServer, eventually

LAYERS, NUM_BLOCKS, BLOCK_SIZE = 2, 32, 4
LAYOUT = KvLayout(1, 2, BLOCK_SIZE, 8, "float32", windows=(0,) * LAYERS)
PATIENCE_S = 60.0


def new_pool() -> VllmPool:
    return VllmPool(torch.zeros(LAYERS * NUM_BLOCKS, LAYOUT.block_bytes, dtype=torch.uint8), LAYOUT)


class Side:
    """A member, its pool, and the ends that vLLM would be given."""

    def __init__(
        self,
        runtime: RuntimeConfig,
        prompts: str = "",
        claim_timeout_ms: int = 60_000,
        engine: str = "",
        rank: int = 0,
        max_prompt_tokens: int = 1000,
    ) -> None:
        self.pool, self.ends = new_pool(), Ends()
        settings = ConnectorSettings(
            config=ConnectorConfig(
                runtime=runtime,
                transfer=TransferConfig(write_timeout_s=1.0, grace_ms=1500),
                queue=QueueConfig(),
                disagg=DisaggConfig(claim_timeout_ms=claim_timeout_ms, handoff_timeout_ms=60_000),
                prefill=PrefillConfig(),
            ),
            model="random",
            weights="w",
            kv_form=f"rank {rank}",
            offers=not prompts,
            takes=bool(prompts),
            prompts=prompts,
            engine=engine or new_id()[:14],
            rank=rank,
            max_prompt_tokens=max_prompt_tokens,
        )
        self.member = Member(settings, self.pool, self.ends)

    def offer(
        self, num_tokens: int, block_ids: list[int], num_cached: int = 0, key: str = ""
    ) -> Offer:
        key = key or secrets.token_hex(16)
        offer = Offer(key, f"r-{key}", list(range(num_tokens)), "", num_cached, block_ids)
        self.member.take_offers(Orders(offers=[offer]))
        return offer


class Engine:
    """Computes a prompt into blocks 1, 2, ... of all ranks of the prefill side, one a step."""

    def __init__(self, runtime: RuntimeConfig) -> None:
        self.server = RequestServer(runtime, new_id())
        self.server.register(COMPUTE, self.compute)
        self.sides: list[Side] = []  # by rank
        self.started = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.fails = False
        self.num_stopped = 0

    async def compute(self, payload: bytes, context: RequestContext, answer: Responder) -> None:
        prompt = msgspec.msgpack.decode(payload, type=ComputePrompt)
        computing = asyncio.create_task(self.steps(prompt.key, unpack_tokens(prompt.token_ids)))
        context.on_cancel(computing.cancel)
        await computing
        answer.send(encode(Ack()))

    async def steps(self, key: str, token_ids: list[int]) -> None:
        block_ids = list(range(1, 1 + -(-len(token_ids) // BLOCK_SIZE)))
        self.started.set()
        for side in self.sides:
            side.member.take_offers(Orders(begun=[key]))
        try:
            await self.goes_on.wait()
            if self.fails:
                raise InternalError("too long")
            for i, block_id in enumerate(block_ids):
                num_tokens = min(len(token_ids), (i + 1) * BLOCK_SIZE)
                progress = Progress(key, num_tokens, block_ids[: i + 1])
                for rank, side in enumerate(self.sides):
                    for record in side.pool.table([block_id]):
                        side.pool.tensor[record] = record + len(token_ids) + 100 * rank
                    side.member.take_progress(Orders(progress=[progress]), None)
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.num_stopped += 1
            raise


class Pair:
    def __init__(self, decode: Side, prefill: Side, engine: Engine) -> None:
        self.decode, self.prefill, self.engine = decode, prefill, engine

    def ticket(self, offer: Offer) -> str:
        """The key of the offer's ticket at the prefill side."""
        return f"{offer.key}.1.{self.decode.member.node.instance_id[:-2]}"


@pytest.fixture
def runtime(nats: NatsServer, etcd: EtcdServer) -> RuntimeConfig:
    return RuntimeConfig(nats_url=nats.url, etcd_endpoints=etcd.url, namespace=new_id())


@asynccontextmanager
async def members(runtime: RuntimeConfig, num_ranks: int) -> AsyncIterator[list[Pair]]:
    """The pairs of the ranks of two engines."""
    engine = Engine(runtime)
    await engine.server.start()
    names = [new_id()[:14] for _ in range(2)]
    pairs = []
    for rank in range(num_ranks):
        decode = Side(runtime, engine=names[0], rank=rank)
        prefill = Side(runtime, engine.server.address, engine=names[1], rank=rank)
        engine.sides.append(prefill)
        await decode.member.start()
        await prefill.member.start()
        pairs.append(Pair(decode, prefill, engine))
    await eventually(lambda: all(each.decode.member.view.num_instances == 1 for each in pairs))
    yield pairs
    engine.goes_on.set()
    for pair in pairs:
        await pair.prefill.member.close()
        await pair.decode.member.close()
    await engine.server.stop()


@pytest.fixture
async def pair(runtime: RuntimeConfig) -> AsyncIterator[Pair]:
    async with members(runtime, 1) as pairs:
        yield pairs[0]


async def ended(side: Side, offer: Offer) -> tuple[bool, bool]:
    """Wait for the end of an offer; return whether it failed, and is in quarantine."""
    await eventually(lambda: bool(side.ends))
    end = side.ends.popleft()
    assert isinstance(end, LoadEnd) and (end.request_id, end.key) == (offer.request_id, offer.key)
    return end.reason is not None, end.quarantined


async def released(side: Side, key: str) -> None:
    """Wait until the blocks of a handoff or a ticket are released."""
    await eventually(lambda: bool(side.ends))
    assert side.ends.popleft() == Released(key)


def contents(pool: VllmPool, block_ids: list[int]) -> torch.Tensor:
    return pool.tensor[pool.table(block_ids)]


async def test_blocks_arrive_by_their_place_in_the_prompt(pair: Pair) -> None:
    offer = pair.decode.offer(11, [9, 4, 7], num_cached=1)
    assert await ended(pair.decode, offer) == (False, False)
    arrived = contents(pair.decode.pool, [4, 7])
    assert torch.equal(arrived, contents(pair.prefill.pool, [2, 3])) and arrived.any()
    assert not contents(pair.decode.pool, [9, 1, 2, 3]).any(), "no other block is written"
    await released(pair.prefill, pair.ticket(offer))
    assert not pair.decode.ends, "nothing was in quarantine"


async def test_a_flipped_bit_is_caught_and_its_blocks_wait_for_the_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = pair.decode.member._group
    checksums = group.checksums

    async def flipped(ranks: RankPair, layers: range, records: list[int]) -> list[int]:
        pair.decode.pool.tensor[records[-1], 3] ^= 1
        return await checksums(ranks, layers, records)

    monkeypatch.setattr(group, "checksums", flipped)
    offer = pair.decode.offer(8, [3, 5])
    failed, quarantined = await ended(pair.decode, offer)
    assert failed
    if quarantined:
        await released(pair.decode, offer.key)
    assert pair.decode.member._handoffs.num_ended["corrupt"] == 1


async def test_an_engine_that_fails_gives_the_prompt_back_at_once(pair: Pair) -> None:
    pair.engine.fails = True
    offer = pair.decode.offer(8, [3, 5])
    assert await ended(pair.decode, offer) == (True, False)
    assert pair.decode.member._handoffs.num_ended["failed"] == 1


async def test_a_cancelled_offer_stops_the_prompt_and_frees_the_blocks(pair: Pair) -> None:
    pair.engine.goes_on.clear()
    offer = pair.decode.offer(8, [3, 5])
    await pair.engine.started.wait()
    pair.decode.member.take_offers(Orders(cancelled=[offer.key]))
    assert await ended(pair.decode, offer) == (False, True)
    await released(pair.decode, offer.key)
    await eventually(lambda: pair.engine.num_stopped == 1)


async def test_without_prefill_workers_a_ticket_is_given_up_after_its_time(
    runtime: RuntimeConfig,
) -> None:
    side = Side(runtime, claim_timeout_ms=100)
    await side.member.start()
    offer = side.offer(8, [3, 5])
    assert await ended(side, offer) == (True, False)
    await side.member.close()


async def test_a_ticket_that_is_too_long_goes_to_a_worker_with_more_context(
    pair: Pair, runtime: RuntimeConfig
) -> None:
    view = lambda: pair.decode.member.view  # noqa: E731
    assert view().max_prompt_tokens == 1000
    shorter = Side(runtime, pair.engine.server.address, max_prompt_tokens=10)
    await shorter.member.start()
    await eventually(lambda: view().num_instances == 2)
    assert view().max_prompt_tokens == 1000
    for _ in range(4):
        offer = pair.decode.offer(11, [9, 4, 7])
        assert await ended(pair.decode, offer) == (False, False)
    assert shorter.member._jobs.num_begun == 0
    await shorter.member.close()


async def test_thresholds_are_live(pair: Pair) -> None:
    node = pair.decode.member.node
    key = config_key(node.config.namespace, "disagg.max_local_prefill_length")
    await node.put(key, b"77")
    await eventually(lambda: pair.decode.member.view.thresholds.max_local_prefill_length == 77)


async def test_a_lost_connection_to_the_engine_ends_its_prompts(pair: Pair) -> None:
    pair.engine.goes_on.clear()
    offer = pair.decode.offer(8, [3, 5])
    await pair.engine.started.wait()
    await pair.engine.server.stop()
    failed, _ = await ended(pair.decode, offer)
    assert failed


# ---- several ranks ----------------------------------------------------------------------------


@pytest.fixture
async def pairs(runtime: RuntimeConfig) -> AsyncIterator[list[Pair]]:
    async with members(runtime, 2) as pairs:
        yield pairs


def offered(pairs: list[Pair], num_tokens: int, block_ids: list[int]) -> Offer:
    """Offer a prompt as the scheduler does: all ranks get it."""
    offer = pairs[0].decode.offer(num_tokens, block_ids)
    assert pairs[1].decode.offer(num_tokens, block_ids, key=offer.key) == offer
    return offer


async def test_each_rank_writes_its_part_into_its_counterpart(pairs: list[Pair]) -> None:
    offer = offered(pairs, 11, [9, 4, 7])
    found = []
    for pair in pairs:
        assert await ended(pair.decode, offer) == (False, False)
        arrived = contents(pair.decode.pool, [9, 4, 7])
        assert torch.equal(arrived, contents(pair.prefill.pool, [1, 2, 3])) and arrived.any()
        await released(pair.prefill, pair.ticket(offer))
        found.append(arrived)
    assert not torch.equal(*found)
    assert pairs[0].engine.num_stopped == 0, "the prompt is computed once, for the first rank"


async def test_a_claim_waits_for_the_step_that_brings_its_offer(
    pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    handoffs, claimed = pairs[1].decode.member._server, asyncio.Event()
    find = handoffs.find

    def found(handoff_id: bytes) -> HandoffReceiver | None:
        claimed.set()
        return find(handoff_id)

    monkeypatch.setattr(handoffs, "find", found)
    offer = pairs[0].decode.offer(8, [3, 5])
    await claimed.wait()
    pairs[1].decode.offer(8, [3, 5], key=offer.key)
    for pair in pairs:
        assert await ended(pair.decode, offer) == (False, False)


async def test_a_cancelled_offer_ends_in_all_ranks(pairs: list[Pair]) -> None:
    pairs[0].engine.goes_on.clear()
    offer = offered(pairs, 8, [3, 5])
    await eventually(lambda: all(len(pair.prefill.member._prompts.open) == 1 for pair in pairs))
    for pair in pairs:
        pair.decode.member.take_offers(Orders(cancelled=[offer.key]))
        assert await ended(pair.decode, offer) == (False, True)
        await released(pair.decode, offer.key)
        await released(pair.prefill, pair.ticket(offer))
    await eventually(lambda: pairs[0].engine.num_stopped == 1)


async def test_a_rank_whose_claim_is_refused_gives_its_part_up_and_uses_no_block(
    pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    health = pairs[1].decode.member._server.health
    monkeypatch.setattr(health, "is_excluded", lambda claimant, now: True)
    offer = offered(pairs, 8, [3, 5])
    assert await ended(pairs[1].decode, offer) == (True, False)
    await released(pairs[1].prefill, pairs[1].ticket(offer))
    assert await ended(pairs[0].decode, offer) == (False, False)
