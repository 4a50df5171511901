"""The data-parallel ranks of an engine's requests."""

from contextlib import ExitStack

from tandem.runtime.config import RuntimeConfig
from tandem.sdk.dynamo.dp_rank import forced_dp_rank
from tandem.sdk.engine.types import EngineConfig, GenerateRequest
from tandem.sdk.engine_worker.ranks import Ranks
from tandem.sdk.engine_worker.worker import EngineWorker
from tandem.sdk.worker.context import Context
from tests.sdk.engine.engine_stack import ToyEngine, config_of


def request(*token_ids: int, **more: object) -> GenerateRequest:
    return {"token_ids": list(token_ids), **more}  # type: ignore[typeddict-item]


def test_requests_go_to_the_rank_with_the_fewest_open_ones() -> None:
    ranks = Ranks(4, 3)
    with ExitStack() as stack:
        opened = [stack.enter_context(ranks.routed(request(1, 2))) for _ in range(6)]
        chosen = [forced_dp_rank(each) for each in opened]
        assert sorted(chosen) == [4, 4, 5, 5, 6, 6]
        assert sorted(chosen[:3]) == [4, 5, 6]


def test_an_equal_head_meets_its_rank_again() -> None:
    ranks = Ranks(0, 8)
    head = list(range(64))
    chosen = set()
    for tail in range(20):
        with ranks.routed(request(*head, tail)) as routed:
            chosen.add(forced_dp_rank(routed))
    assert len(chosen) == 1
    others = set()
    for first in range(64):
        with ranks.routed(request(first)) as routed:
            others.add(forced_dp_rank(routed))
    assert len(others) > 1


def test_the_callers_rank_is_kept_and_counted() -> None:
    ranks = Ranks(0, 2)
    with ranks.routed(request(1, routing={"dp_rank": 1, "other": True})) as routed:
        assert routed["routing"] == {"dp_rank": 1, "other": True}
        with ranks.routed(request(1)) as second:
            assert forced_dp_rank(second) == 0


class TwoRanks(ToyEngine):
    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig("tandem-tiny", data_parallel_size=2, data_parallel_start_rank=2)


async def test_an_engine_with_ranks_is_given_one(runtime_config: RuntimeConfig) -> None:
    engine = TwoRanks()
    worker = EngineWorker(engine, config_of(), runtime_config)
    try:
        await worker.startup()
        [_, last] = [chunk async for chunk in worker.handler.answer(request(1), Context())]
        assert last["finish_reason"] == "stop"
    finally:
        await worker.stop()
    assert forced_dp_rank(engine.requests[-1]) in (2, 3)
