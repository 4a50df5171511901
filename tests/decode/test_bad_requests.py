"""Requests that hold numbers no step can compute, beside honest streams."""

from typing import Any, TypeVar

import msgspec
import pytest

from tandem.decode.requests import ActiveRequest
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.messages import (
    GenerateRequest,
    SamplingParams,
    StopConditions,
    encode,
    pack_tokens,
)
from tests.decode.prefill_peer import PROMPT, Answer, Stage
from tests.handoff_peer import fresh_prompt

pytestmark = pytest.mark.asyncio(loop_scope="module")  # as the stage's

T = TypeVar("T")
NAN, INF = float("nan"), float("inf")
HONEST = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, top_p=0.9, seed=7),
    SamplingParams(temperature=0, presence_penalty=0.5, logprobs=2),
    SamplingParams(temperature=1.2, top_k=9, seed=8),
    SamplingParams(temperature=0, repetition_penalty=1.3),
    SamplingParams(temperature=1, min_p=0.1, logit_bias={9: 3.0}, seed=9),
]
LONG_ANSWER = StopConditions(max_tokens=40, ignore_eos=True)
BAD_SAMPLING: list[dict[str, Any]] = [
    *[{"repetition_penalty": value} for value in (1e-40, 5e-324, 0.0, NAN, INF)],
    *[{"top_k": value} for value in (2**63 - 1, 2**63, 2**63 + 5)],
    *[{"logit_bias": {5: value}} for value in (NAN, INF)],
    {"logit_bias": {2**31: 1.0}},
    *[{"logprobs": value} for value in (-3, 2**40)],
    *[{"temperature": value} for value in (NAN, INF)],
    *[{"presence_penalty": value} for value in (NAN, 1e300)],
    {"frequency_penalty": -INF},
    {"min_p": 5.0},
]
BAD_STOP: list[dict[str, Any]] = [
    {"min_tokens": 2**63 - 1},
    {"max_tokens": 2**63},
    {"stop_token_ids": [2**63]},
]


def decode_unbounded(payload: bytes) -> GenerateRequest:
    """Decode a request without a look at its numbers."""

    def made(kind: type[T], fields: dict[str, Any]) -> T:
        return kind(**{name: value for name, value in fields.items() if name != "type"})

    fields = msgspec.msgpack.decode(payload)
    fields["sampling"] = made(SamplingParams, fields["sampling"])
    fields["stop"] = made(StopConditions, fields["stop"])
    return made(GenerateRequest, fields)


async def beside_honest_streams(stage: Stage) -> list[Answer]:
    """The ended streams of 22 bad requests; six honest streams give their whole texts meanwhile."""
    prompts = [fresh_prompt(17, seed) for seed in range(6)]
    asked = list(zip(prompts, HONEST, strict=True))
    expected = [stage.undisturbed(*each, LONG_ANSWER).token_ids for each in asked]
    honest = [
        await stage.ask(prompt, sampling=sampling, stop=LONG_ANSWER, place="local")
        for prompt, sampling in asked
    ]
    bad = await ask_badly(stage)
    assert [(await answer.whole()).token_ids for answer in honest] == expected
    for answer in bad:
        await answer.ended.wait()
    return bad


async def ask_badly(stage: Stage) -> list[Answer]:
    answers = []
    for sampling in BAD_SAMPLING:
        params = SamplingParams(**{"temperature": 1.0, **sampling})
        answers.append(await stage.ask(PROMPT, sampling=params, stop=LONG_ANSWER, place="local"))
    for stop in BAD_STOP:
        conditions = StopConditions(**{"max_tokens": 40, **stop})
        answers.append(await stage.ask(PROMPT, stop=conditions, place="local"))
    return answers


async def test_bad_requests_fail_alone_beside_honest_streams(stage: Stage) -> None:
    bad = await beside_honest_streams(stage)
    assert len(bad) == 22
    for answer in bad:
        assert isinstance(answer.error, InvalidRequestError) and answer.error.param
        assert answer.text.token_ids == []


async def test_numbers_that_pass_every_check_still_fail_alone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine's own defense: the same requests, as if the bounds were not checked."""
    caplog.set_level("CRITICAL")
    monkeypatch.setattr("tandem.decode.requests._decode_request", decode_unbounded)
    monkeypatch.setattr(
        "tandem.decode.requests.checked_token_ids",
        lambda request, vocab_size: list(memoryview(request.token_ids).cast("I")),
    )
    bad = await beside_honest_streams(stage)
    # Some of the numbers are harmless to a sampler.
    assert sum(answer.error is not None for answer in bad) >= 12


async def test_a_worker_that_sees_no_images_answers_no_prompt_with_them() -> None:
    request = GenerateRequest(
        "r", "m", pack_tokens([1]), SamplingParams(), StopConditions(4), 1000, images=[b"png"]
    )
    responder: Any = None
    async with RequestContext() as context:
        with pytest.raises(InvalidRequestError, match="see no images"):
            ActiveRequest.from_wire(encode(request), context, responder, model="m", vocab_size=8)


async def test_a_first_token_outside_of_the_vocabulary_is_refused(stage: Stage) -> None:
    beside = await stage.ask(fresh_prompt(17, 1), stop=LONG_ANSWER, place="local")
    answer, work = await stage.handoff(PROMPT)
    honest = work.first
    assert honest is not None
    for token_id in (-1, 320, 2**31, 2**63):
        work.first = msgspec.structs.replace(honest, token_id=token_id)
        with pytest.raises(InvalidRequestError, match="token_id"):
            await stage.send_first(work)
    work.first = honest
    await stage.deliver(work)
    assert await answer.whole() == stage.undisturbed(PROMPT)
    assert await beside.whole() == stage.undisturbed(fresh_prompt(17, 1), stop=LONG_ANSWER)
