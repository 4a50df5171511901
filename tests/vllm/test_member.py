"""Two members of a cluster, one with tickets and one that takes them, without vLLM.

A fake engine computes prompts: it fills blocks of the prefill side's pool, and reports its steps.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator

import msgspec
import pytest
import torch

from tandem.decode.config import DisaggConfig
from tandem.prefill.config import PrefillConfig
from tandem.queue.config import QueueConfig
from tandem.runtime.address import new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.discovery import config_key
from tandem.runtime.errors import InternalError
from tandem.runtime.messages import Ack, encode, unpack_tokens
from tandem.runtime.plane.server import RequestServer, Responder
from tandem.transfer.config import TransferConfig
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
        self, runtime: RuntimeConfig, prompts: str = "", claim_timeout_ms: int = 60_000
    ) -> None:
        self.pool, self.ends = new_pool(), Ends()
        settings = ConnectorSettings(
            config=ConnectorConfig(
                runtime=runtime,
                transfer=TransferConfig(grace_ms=300),
                queue=QueueConfig(),
                disagg=DisaggConfig(claim_timeout_ms=claim_timeout_ms, handoff_timeout_ms=60_000),
                prefill=PrefillConfig(),
            ),
            model="random",
            weights="w",
            kv_form="f",
            offers=not prompts,
            takes=bool(prompts),
            prompts=prompts,
        )
        self.member = Member(settings, self.pool, self.ends)

    def offer(self, num_tokens: int, block_ids: list[int], num_cached: int = 0) -> Offer:
        key = secrets.token_hex(16)
        offer = Offer(key, f"r-{key}", list(range(num_tokens)), "", num_cached, block_ids)
        self.member.take_offers(Orders(offers=[offer]))
        return offer


class Engine:
    """Computes a prompt into blocks 1, 2, ... of the prefill side, one block a step."""

    def __init__(self, runtime: RuntimeConfig) -> None:
        self.server = RequestServer(runtime, new_id())
        self.server.register(COMPUTE, self.compute)
        self.side: Side
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
        try:
            await self.goes_on.wait()
            if self.fails:
                raise InternalError("too long")
            for i, block_id in enumerate(block_ids):
                for record in self.side.pool.table([block_id]):
                    self.side.pool.tensor[record] = record + len(token_ids)
                num_tokens = min(len(token_ids), (i + 1) * BLOCK_SIZE)
                progress = Progress(key, num_tokens, block_ids[: i + 1])
                self.side.member.take_progress(Orders(progress=[progress]), None)
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.num_stopped += 1
            raise


class Pair:
    def __init__(self, decode: Side, prefill: Side, engine: Engine) -> None:
        self.decode, self.prefill, self.engine = decode, prefill, engine


@pytest.fixture
async def pair(nats: NatsServer, etcd: EtcdServer) -> AsyncIterator[Pair]:
    runtime = RuntimeConfig(nats_url=nats.url, etcd_endpoints=etcd.url, namespace=new_id())
    engine = Engine(runtime)
    await engine.server.start()
    decode, prefill = Side(runtime), Side(runtime, engine.server.address)
    engine.side = prefill
    await decode.member.start()
    await prefill.member.start()
    await eventually(lambda: decode.member.view.num_instances == 1)
    yield Pair(decode, prefill, engine)
    engine.goes_on.set()
    await prefill.member.close()
    await decode.member.close()
    await engine.server.stop()


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
    await released(pair.prefill, f"{offer.key}.1")
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
    nats: NatsServer, etcd: EtcdServer
) -> None:
    runtime = RuntimeConfig(nats_url=nats.url, etcd_endpoints=etcd.url, namespace=new_id())
    side = Side(runtime, claim_timeout_ms=100)
    await side.member.start()
    offer = side.offer(8, [3, 5])
    assert await ended(side, offer) == (True, False)
    await side.member.close()


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
