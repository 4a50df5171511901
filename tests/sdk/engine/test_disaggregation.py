"""Prefill and decode engines, each with a worker of its own."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from tandem.launch.cluster.status import read_cluster
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import InvalidRequestError, UnavailableError
from tandem.sdk import (
    ComponentSnapshot,
    Context,
    DisaggregationMode,
    EngineConfig,
    GenerateRequest,
    LLMEngine,
    StepCosts,
    enforce_prefill_max_tokens,
    extract_prefill_result,
    require_prefill_result,
)
from tandem.sdk.engine.health_check import HEALTH_CHECK_KEY
from tandem.sdk.engine.metrics import ENGINE_LABELS, EngineGauges, SnapshotPublisher
from tests.config.configs import config_of as effective_config_of
from tests.sdk.engine.engine_stack import (
    Chunks,
    Publishing,
    ToyEngine,
    answer_of,
    client_of,
    config_of,
    serving,
)
from tests.services import eventually

PREFILL = config_of(disaggregation_mode=DisaggregationMode.PREFILL)
DECODE = config_of(disaggregation_mode=DisaggregationMode.DECODE)
REQUEST = {"token_ids": [7, 8, 9], "stop_conditions": {"max_tokens": 5, "min_tokens": 3}}


class Prefill(ToyEngine):
    """Hands out where the KV cache of a prompt lies; is busy until `transfers` is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers: set[str] = set()
        self.num_asked = 0

    async def generate(self, request: GenerateRequest, context: Context) -> Chunks:
        self.requests.append(request)
        if request["token_ids"] == [0]:
            raise InvalidRequestError("token 0 is forbidden", param="token_ids")
        if request["token_ids"] == [1]:
            raise RuntimeError("broken")
        yield {
            "token_ids": [10],
            "index": 0,
            "finish_reason": "length",
            "disaggregated_params": {"blocks": [3, 4]},
        }

    async def is_quiescent(self) -> bool | None:
        self.num_asked += 1
        return not self.transfers


class Decode(ToyEngine):
    async def generate(self, request: GenerateRequest, context: Context) -> Chunks:
        self.requests.append(request)
        if request.get("model") == "needs prefill":
            require_prefill_result(request, DisaggregationMode.DECODE)
        yield {"token_ids": [11], "index": 0, "finish_reason": "stop"}


async def test_a_decode_engine_gets_what_the_prefill_engine_left(quick: RuntimeConfig) -> None:
    prefill, decode = Prefill(), Decode()
    async with (
        serving(prefill, PREFILL, quick) as first,
        serving(decode, DECODE, quick) as second,
        client_of(second) as client,
    ):
        assert str(first.address) == "pipe.prefill.generate"
        assert await answer_of(client, REQUEST)
        assert prefill.requests[0]["stop_conditions"] == {"max_tokens": 1, "min_tokens": 0}
        assert extract_prefill_result(decode.requests[0]) == {
            "disaggregated_params": {"blocks": [3, 4]}
        }
        assert decode.requests[0]["stop_conditions"] == REQUEST["stop_conditions"]

        # the caller is at fault: decode would find the same
        with pytest.raises(InvalidRequestError, match="token 0"):
            await answer_of(client, {"token_ids": [0]})
        # the prefill worker is at fault: decode does without
        await answer_of(client, {"token_ids": [1]})
        assert extract_prefill_result(decode.requests[-1]) is None
        # a health check calls no prefill worker
        num_asked = len(prefill.requests)
        await answer_of(client, {"token_ids": [5], HEALTH_CHECK_KEY: True})
        assert len(prefill.requests) == num_asked


class Reporting(Publishing):
    """An engine that can report its load and costs: a second per token, or a hundredth."""

    def report(self, per_token_s: float, num_waiting_tokens: int = 0) -> None:
        costs = StepCosts((0.01, 0.001, 0.0), (0.001, per_token_s, 0.0), 0.1, 4096, 512)
        self.publisher.publish(
            0,
            ComponentSnapshot(
                1, 8, 0.1, 0, num_waiting_tokens=num_waiting_tokens, step_costs=costs
            ),
        )


class ReportingPrefill(Prefill, Reporting):
    pass


class ReportingDecode(Decode, Reporting):
    pass


class NoTrials(random.Random):
    """Chance that sends no prompt where it seems worse: that is no subject here."""

    def random(self) -> float:
        return 1.0

    def getrandbits(self, k: int) -> int:  # else integers would follow from `random`
        return super().getrandbits(k)


async def test_a_prompt_is_computed_where_that_is_predicted_to_delay_least(
    quick: RuntimeConfig,
) -> None:
    one, two, decode = ReportingPrefill(), ReportingPrefill(), ReportingDecode()
    async with (
        serving(one, PREFILL, quick) as first,
        serving(two, PREFILL, quick) as second,
        serving(decode, DECODE, quick) as worker,
        client_of(worker) as client,
    ):
        stage = worker.handler.prefill
        assert stage is not None
        stage._router.rng = NoTrials()
        here = worker.runtime.instance_id

        def asked() -> tuple[int, int]:
            return len(one.requests), len(two.requests)

        async def is_placed_at(instance_id: str | None) -> bool:
            decision = stage.decide(100)
            if (decision.instance_id if decision else None) != instance_id:
                return False  # a report is on its way
            before = asked()
            await answer_of(client, {"token_ids": [7] * 100})
            places = (first.runtime.instance_id, second.runtime.instance_id)
            grown = tuple(now - then for now, then in zip(asked(), before, strict=True))
            # one whose heartbeats are late on a busy machine is left out for a while
            return grown == tuple(int(place == instance_id) for place in places)

        async def placed_at(instance_id: str) -> None:
            await eventually(lambda: is_placed_at(instance_id))

        await eventually(lambda: len(stage._client.instance_ids()) == 2)
        for _ in range(2):  # no costs: in turn
            assert stage.decide(100) is None
            await answer_of(client, {"token_ids": [7] * 100})
        assert asked() == (1, 1)
        decode.report(0.01)  # none of the prefill engines' costs is known
        await placed_at(here)
        assert extract_prefill_result(decode.requests[-1]) is None
        one.report(0.001, num_waiting_tokens=500)
        two.report(0.001)
        await placed_at(second.runtime.instance_id)
        await placed_at(second.runtime.instance_id)
        assert extract_prefill_result(decode.requests[-1]) is not None
        two.report(0.001, num_waiting_tokens=2000)
        await placed_at(first.runtime.instance_id)
        decode.report(0.0005)
        await placed_at(here)
        decision = stage.decide(100)
        assert decision is not None and decision.reason.startswith("first token in 51.0 ms")

        # what was just placed counts before any report
        decode.report(0.01)
        for prefill in (one, two):
            prefill.report(0.002)
        await eventually(lambda: stage.decide(100).predicted_ms == pytest.approx(201.0))
        decode.report(0.002)
        await eventually(lambda: stage.decide(100).instance_id == here)
        contexts = [Context() for _ in range(3)]
        prompt: GenerateRequest = {"token_ids": [7] * 100}
        placed = [await stage.prepare(prompt, context) for context in contexts]
        assert [bool(extract_prefill_result(each)) for each in placed] == [False, True, True]
        stage.ended(contexts[0])
        assert extract_prefill_result(await stage.prepare(prompt, Context())) is None


class ShortPrefill(Prefill):
    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="tandem-tiny", served_model_name="toy", context_length=11)


async def test_a_prefill_engine_is_not_asked_for_a_prompt_beyond_its_context(
    quick: RuntimeConfig,
) -> None:
    short, decode = ShortPrefill(), Decode()
    async with (
        serving(short, PREFILL, quick),
        serving(decode, DECODE, quick) as worker,
        client_of(worker) as client,
    ):
        await answer_of(client, {"token_ids": [7] * 10})
        await answer_of(client, {"token_ids": [7] * 11})
        assert [len(each["token_ids"]) for each in short.requests] == [10]
        long = Prefill()
        async with serving(long, PREFILL, quick):
            stage = worker.handler.prefill
            assert stage is not None
            await eventually(lambda: len(stage._client.instance_ids()) == 2)
            for _ in range(4):
                await answer_of(client, {"token_ids": [7] * 11})
            assert len(long.requests) == 4 and len(short.requests) == 1


HONEST = ComponentSnapshot(1, 8, 0.1, 0, num_waiting_tokens=5, num_decodes=2, decode_context=9)
BAD_COSTS = StepCosts((0.0, -1.0, 0.0), (0.0, 0.0, 0.0), 0.1, 4096, 512)
BAD_NUMBERS: list[tuple[str, Any]] = [
    *((name, -1) for name in vars(HONEST) if name not in ("kv_cache_hit_rate", "step_costs")),
    *((name, 2**64) for name in ("kv_used_blocks", "num_waiting_tokens", "decode_context")),
    *((name, math.nan) for name in ("gpu_cache_usage", "kv_cache_hit_rate")),
    ("num_decodes", 0.5),
    ("step_costs", BAD_COSTS),
]


@pytest.mark.parametrize(("field", "number"), BAD_NUMBERS, ids=str)
def test_a_number_that_no_engine_can_have_is_not_published_and_logged_once(
    field: str, number: Any, caplog: pytest.LogCaptureFixture
) -> None:
    labels = dict.fromkeys(ENGINE_LABELS, "")
    publisher = SnapshotPublisher(EngineGauges(labels), [0], lambda: None)
    publisher.publish(0, HONEST)
    for _ in range(3):
        publisher.publish(0, replace(HONEST, **{field: number}))
    assert publisher.latest == {0: HONEST}
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert field in caplog.text


async def test_status_shows_prefill_engines_beside_the_decode_engine(quick: RuntimeConfig) -> None:
    names = ("namespace", "nats_url", "etcd_endpoints")
    flags = [f"--runtime.{name}={getattr(quick, name)}" for name in names]
    async with serving(Prefill(), PREFILL, quick), serving(Decode(), DECODE, quick):
        report = await read_cluster(effective_config_of(*flags))
    shown = {
        each.instance.component: (each.instance.namespace, each.instance.model, each.state)
        for each in report.instances
    }
    toy = ("pipe", "toy", "serving")
    assert shown == {"backend": toy, "prefill": toy} and report.queues == []
    assert all(each.worker and each.worker.load.num_running == 0 for each in report.instances)


async def test_without_prefill_workers_a_decode_engine_does_it_alone_or_says_that_it_cannot(
    quick: RuntimeConfig,
) -> None:
    decode = Decode()
    async with serving(decode, DECODE, quick) as worker, client_of(worker) as client:
        assert await answer_of(client, REQUEST)
        assert extract_prefill_result(decode.requests[0]) is None
        with pytest.raises(UnavailableError, match="prefill_result"):
            await answer_of(client, REQUEST | {"model": "needs prefill"})


async def test_a_prefill_engine_is_kept_until_its_cache_is_read_no_more(
    quick: RuntimeConfig,
) -> None:
    engine = Prefill()
    engine.transfers.add("to decode")
    async with serving(engine, PREFILL, quick.model_copy(update={"drain_timeout_s": 40.0})) as it:
        it.shutdown()
        await eventually(lambda: engine.num_asked > 1)
        assert engine.calls == ["start", "drain"]
        engine.transfers.clear()
    assert engine.calls == ["start", "drain", "cleanup"]


async def test_an_engine_that_cannot_tell_is_kept_for_the_whole_time(
    quick: RuntimeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    class Mute(Prefill):
        async def is_quiescent(self) -> bool | None:
            return None

    class MuteAndUndrained(Mute):
        drain = LLMEngine.drain

    async with serving(MuteAndUndrained(), PREFILL, quick) as worker:
        worker.shutdown()
    assert "KV transfers may still be under way" in caplog.text
    caplog.clear()
    async with serving(Mute(), PREFILL, quick) as worker:
        worker.shutdown()
    assert "KV transfers" not in caplog.text


def test_the_helpers_change_and_find_what_they_say() -> None:
    request: GenerateRequest = {"token_ids": [1], "stop_conditions": {"max_tokens": 64}}
    assert enforce_prefill_max_tokens(request)["stop_conditions"] == {"max_tokens": 1}
    assert enforce_prefill_max_tokens({"token_ids": []})["stop_conditions"] == {"max_tokens": 1}
    with pytest.raises(ValueError, match="prefill_result"):
        require_prefill_result(request, DisaggregationMode.DECODE)
    request["prefill_result"] = {"disaggregated_params": {}}
    assert require_prefill_result(request, DisaggregationMode.DECODE) is extract_prefill_result(
        request
    )
