"""Engines of a kit's disaggregation that pass the KV cache between them, both legs at once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import InvalidRequestError
from tandem.sdk import Context, DisaggregationMode, EngineConfig, GenerateRequest
from tandem.sdk.engine_worker.overlap import PrefillLeg
from tandem.sdk.worker.client import Client
from tests.sdk.engine.engine_stack import (
    PATIENCE_S,
    Chunks,
    ToyEngine,
    answer_of,
    client_of,
    config_of,
    serving,
)
from tests.services import eventually

PREFILL = config_of(disaggregation_mode=DisaggregationMode.PREFILL)
DECODE = config_of(disaggregation_mode=DisaggregationMode.DECODE)
REQUEST = {"token_ids": [7, 8, 9], "stop_conditions": {"max_tokens": 5}}


class Meeting(ToyEngine):
    """One leg; it goes on when the other one has come, as an engine that moves KV must."""

    rooms: dict[int, dict[str, asyncio.Event]]

    def __init__(self, side: str, rooms: dict[int, dict[str, asyncio.Event]]) -> None:
        super().__init__()
        self.side, self.rooms = side, rooms
        self.comes = True
        self.error: Exception | None = None
        self.is_cancelled = asyncio.Event()

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="tandem-tiny", served_model_name="toy", bootstrap_port=4711)

    async def generate(self, request: GenerateRequest, context: Context) -> Chunks:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        if (info := request.get("bootstrap_info")) is not None:
            room = self.rooms.setdefault(
                info["bootstrap_room"], {"prefill": asyncio.Event(), "decode": asyncio.Event()}
            )
            if self.comes:
                room[self.side].set()
            other = room["decode" if self.side == "prefill" else "prefill"]
            met = asyncio.create_task(other.wait())
            ended = asyncio.create_task(context.async_killed_or_stopped())
            try:
                await asyncio.wait({met, ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not met.done():
                    self.is_cancelled.set()
                met.cancel()
                ended.cancel()
        yield {"token_ids": [11], "index": 0}
        yield {"token_ids": [12], "index": 0, "finish_reason": "stop"}


Legs = tuple[Meeting, Meeting, Client]


@pytest.fixture
async def legs(quick: RuntimeConfig) -> AsyncIterator[Legs]:
    rooms: dict[int, dict[str, asyncio.Event]] = {}
    prefill, decode = Meeting("prefill", rooms), Meeting("decode", rooms)
    async with (
        serving(prefill, PREFILL, quick),
        serving(decode, DECODE, quick) as worker,
        client_of(worker) as client,
    ):
        yield prefill, decode, client


async def test_both_legs_run_at_once_and_meet(legs: Legs) -> None:
    prefill, decode, client = legs
    for _ in range(2):
        async with asyncio.timeout(PATIENCE_S):
            chunks = await answer_of(client, REQUEST)
        assert [chunk["token_ids"] for chunk in chunks] == [[11], [12]]
    infos = [each.get("bootstrap_info") for each in (*prefill.requests, *decode.requests)]
    assert infos[:2] == infos[2:]
    assert {info and info["bootstrap_port"] for info in infos} == {4711}
    assert {info and info["bootstrap_host"] for info in infos} == {"127.0.0.1"}
    assert len({info and info["bootstrap_room"] for info in infos}) == 2
    assert prefill.requests[0]["stop_conditions"] == {"max_tokens": 1, "min_tokens": 0}
    assert decode.requests[0]["stop_conditions"] == {"max_tokens": 5}


async def test_a_prefill_that_fails_leaves_the_prompt_to_the_decode_engine(legs: Legs) -> None:
    prefill, decode, client = legs
    prefill.error = RuntimeError("out of memory")
    async with asyncio.timeout(PATIENCE_S):
        chunks = await answer_of(client, REQUEST)
    assert [chunk["token_ids"] for chunk in chunks] == [[11], [12]]
    assert ["bootstrap_info" in each for each in decode.requests] == [True, False]
    assert decode.is_cancelled.is_set()


async def test_a_fault_of_the_caller_that_the_prefill_finds_is_the_answer(legs: Legs) -> None:
    prefill, decode, client = legs
    prefill.error = InvalidRequestError("token 7 is forbidden", param="token_ids")
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(InvalidRequestError, match="token 7"):
            await answer_of(client, REQUEST)
    assert len(decode.requests) == 1


async def test_a_caller_that_leaves_ends_both_legs(legs: Legs) -> None:
    prefill, decode, client = legs
    decode.comes = prefill.comes = False
    asking = asyncio.create_task(_open_and_wait(client))
    async with asyncio.timeout(PATIENCE_S):
        await eventually(lambda: bool(prefill.requests and decode.requests))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await prefill.is_cancelled.wait()
        await decode.is_cancelled.wait()


async def _open_and_wait(client: Client) -> None:
    async with await client.generate(REQUEST, False) as answer:
        await anext(answer)


async def _chunks() -> Chunks:
    await asyncio.Event().wait()
    yield {"token_ids": [], "index": 0}


async def _failing() -> None:
    raise ConnectionError("gone")


@contextlib.asynccontextmanager
async def _leg(work: Callable[[], Awaitable[None]]) -> AsyncIterator[PrefillLeg]:
    leg = PrefillLeg("r", work())  # type: ignore[arg-type]
    try:
        yield leg
    finally:
        leg.end(at_once=True)


@pytest.mark.parametrize("num_turns", range(3))
async def test_a_prefill_may_fail_before_and_while_the_first_chunk_is_awaited(
    num_turns: int,
) -> None:
    async with _leg(_failing) as leg, asyncio.timeout(PATIENCE_S):
        for _ in range(num_turns):
            await asyncio.sleep(0)
        assert await leg.first_of(_chunks()) is None


async def test_a_time_limit_of_the_engine_itself_stays_its_error() -> None:
    async def late() -> Chunks:
        raise TimeoutError("the engine's own")
        yield {"token_ids": [], "index": 0}

    async with _leg(asyncio.Event().wait) as leg:  # type: ignore[arg-type]
        with pytest.raises(TimeoutError, match="the engine's own"):
            await leg.first_of(late())
