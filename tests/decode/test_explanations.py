"""The decisions that a decode worker remembers, for `tandem explain`."""

import asyncio
from typing import Any

import msgspec
import pytest

from tandem.decode.admission import PrefillSide, decide, given_up, without_room
from tandem.decode.config import DisaggConfig
from tandem.decode.explanations import Explanations
from tandem.decode.requests import ActiveRequest
from tandem.engine.schedule.sequence import Sequence
from tandem.router.predict import PlaceLoad
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.cluster_messages import StepCosts
from tandem.runtime.wire.explain_messages import (
    MAX_REMEMBERED,
    ExplainRequest,
    PromptExplanation,
    PromptExplanations,
)
from tandem.runtime.wire.messages import (
    GenerateRequest,
    Routed,
    SamplingParams,
    StopConditions,
    encode,
)

COSTS = StepCosts((0.01, 0.0, 0.0), (0.0, 1e-3, 0.0), 0.05, 100_000, 100_000)  # 1 ms a token
SIDE = PrefillSide(
    num_instances=2,
    queue_connected=True,
    here=PlaceLoad(COSTS, num_decodes=5, num_waiting_tokens=500),
    others=[PlaceLoad(COSTS, instance_id="p1"), PlaceLoad(COSTS, 0, 0, 900, "p2")],
)
ROUTED = Routed(["d1", "d2"], [0.003, 0.002], [0.004, 0.002], [1.0, 0.0])


def active(request_id: str) -> ActiveRequest:
    """A request whose prompt was placed by prediction: its first token has 900 ms."""
    sampling, stop = SamplingParams(), StopConditions(max_tokens=8)
    asked = GenerateRequest(request_id, "m", b"", sampling, stop, 1000, routed=ROUTED)
    seq = Sequence(request_id, [1] * 1200, 1200, sampling, stop)
    done = asyncio.get_running_loop().create_future()
    client: Any = None
    found = ActiveRequest(asked, seq, RequestContext(), client, done)
    found.place(decide(DisaggConfig(ttft_target_ms=900), 1200, SIDE))
    return found


async def told(explanations: Explanations, request_id: str) -> list[PromptExplanation]:
    sent: list[bytes] = []

    class Client:
        send = staticmethod(sent.append)

    client: Any = Client
    await explanations.send(encode(ExplainRequest(request_id)), RequestContext(), client)
    return msgspec.msgpack.decode(sent[0], type=PromptExplanations).found


async def test_every_place_has_its_prediction_and_the_targets_that_it_misses() -> None:
    running = {"r": active("r")}
    [found] = await told(Explanations("d1", running), "r")
    assert (found.outcome, found.place, found.cause) == ("running", "remote", "faster")
    assert [each.instance_id for each in found.routed] == ["d1", "d2"]
    assert [each.fits for each in found.routed] == [True, False]
    assert found.routed[0].cost_ms == pytest.approx(4.0) and found.ttft_target_ms == 900
    assert [each.instance_id for each in found.considered] == ["d1", "p1", "p2"]
    assert [each.place for each in found.considered] == ["local", "remote", "remote"]
    assert found.considered[2].wait_ms == pytest.approx(900)
    assert all(each.num_missed == 1 for each in found.considered)  # 1200 tokens take 1200 ms
    assert found.considered[1].cost_ms < found.considered[0].cost_ms


async def test_a_remote_prefill_that_was_given_up_keeps_its_first_decision() -> None:
    explanations, gone = Explanations("d1", {}), active("r")
    gone.place_again(given_up("deadline"))
    gone.done.set_result(None)
    explanations.ended(gone, gone.outcome)
    [found] = await told(explanations, "r")
    assert (found.place, found.last_place) == ("remote", "local")
    assert (found.outcome, found.last_reason) == ("finished", "remote failed: deadline")
    assert len(found.considered) == 3


async def test_a_prompt_without_room_keeps_the_predictions() -> None:
    remote = decide(DisaggConfig(), 1200, SIDE)
    local = without_room(remote)
    assert (local.place, local.cause) == ("local", "no_blocks")
    assert local.places == remote.places and len(local.places) == 3


async def test_the_last_requests_are_remembered_and_no_more() -> None:
    explanations = Explanations("d1", {})
    for number in range(MAX_REMEMBERED + 1):
        each = active(f"r{number}-0")
        each.done.set_result(None)
        explanations.ended(each, each.outcome)
    assert await told(explanations, "r0") == []
    assert len(await told(explanations, "r1")) == 1  # by the id of all its sequences
    assert len(await told(explanations, f"r{MAX_REMEMBERED}-0")) == 1
    assert await told(explanations, "r") == []


async def test_a_request_that_has_no_place_yet_is_not_told() -> None:
    waiting = active("r")
    waiting.decision = waiting.first_decision = None
    assert await told(Explanations("d1", {"r": waiting}), "r") == []


async def test_a_question_without_an_id_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="length >= 1"):
        await told(Explanations("d1", {}), "")
