"""Prefill and decode engines, each with a worker of its own."""

from collections.abc import AsyncGenerator

import pytest

from tandem.launch.status import read_cluster
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import InvalidRequestError, UnavailableError
from tandem.sdk import (
    Context,
    DisaggregationMode,
    GenerateChunk,
    GenerateRequest,
    LLMEngine,
    enforce_prefill_max_tokens,
    extract_prefill_result,
    require_prefill_result,
)
from tandem.sdk.engine.health_check import HEALTH_CHECK_KEY
from tests.launch.configs import config_of as effective_config_of
from tests.sdk.engine.engine_stack import ToyEngine, answer_of, client_of, config_of, serving
from tests.sdk.kit_pair import eventually

PREFILL = config_of(disaggregation_mode=DisaggregationMode.PREFILL)
DECODE = config_of(disaggregation_mode=DisaggregationMode.DECODE)
REQUEST = {"token_ids": [7, 8, 9], "stop_conditions": {"max_tokens": 5, "min_tokens": 3}}


@pytest.fixture
def quick(runtime_config: RuntimeConfig) -> RuntimeConfig:
    return runtime_config.model_copy(update={"drain_timeout_s": 0.8})


class Prefill(ToyEngine):
    """Hands out where the KV cache of a prompt lies; is busy until `transfers` is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers: set[str] = set()
        self.num_asked = 0

    async def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[GenerateChunk, None]:
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
    async def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[GenerateChunk, None]:
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


async def test_status_shows_prefill_engines_beside_the_decode_engine(quick: RuntimeConfig) -> None:
    names = ("namespace", "nats_url", "etcd_endpoints")
    flags = [f"--runtime.{name}={getattr(quick, name)}" for name in names]
    async with serving(Prefill(), PREFILL, quick), serving(Decode(), DECODE, quick):
        report = await read_cluster(effective_config_of(*flags))
    shown = {
        each.instance.component: (each.instance.model, each.state) for each in report.instances
    }
    assert shown == {"backend": ("toy", "serving"), "prefill": ("toy", "serving")}


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
