"""Handlers of every kind, behind a real wire."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import pytest
from prometheus_client import REGISTRY
from pydantic import BaseModel

from tandem.runtime.errors import (
    ConfigError,
    IncompleteError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    TandemError,
)
from tandem.runtime.plane.response_stream import WINDOW_ITEMS
from tandem.sdk import Context, StreamIncomplete
from tests.sdk.kit_pair import PATIENCE_S, Pair, Seen, data_of
from tests.services import eventually


class Question(BaseModel):
    text: str
    times: int = 1


class Answer(BaseModel):
    text: str


class Color(Enum):
    RED = "red"


@dataclass
class Point:
    x: int


async def words(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    for word in request["text"].split():
        yield {"word": word}


async def words_of_a_model(request: Question, context: Context) -> AsyncIterator[Answer]:
    for _ in range(request.times):
        yield Answer(text=f"{request.text} {context.id()}")


def plain_words(request: str) -> Iterator[str]:
    yield from request.split()


async def one_word(request: str) -> str:
    return request.upper()


async def a_generator_after_a_wait(request: int) -> AsyncIterator[int]:
    await asyncio.sleep(0)

    async def numbers() -> AsyncIterator[int]:
        for number in range(request):
            yield number

    return numbers()


async def nothing(request: Any) -> None:
    return None


async def with_a_prefix(prefix: str, request: "Question") -> str:
    return prefix + request.text


class CallableHandler:
    async def __call__(self, request: Question) -> str:
        return request.text


@pytest.mark.parametrize(
    ("handler", "request_value", "expected"),
    [
        (words, {"text": "a b"}, [{"word": "a"}, {"word": "b"}]),
        (plain_words, "a b", ["a", "b"]),
        (one_word, "abc", ["ABC"]),
        (a_generator_after_a_wait, 3, [0, 1, 2]),
        (nothing, [1], []),
        (CallableHandler(), {"text": "x"}, ["x"]),
        (partial(with_a_prefix, "y"), {"text": "x"}, ["yx"]),
        (lambda request: request, [1, 2.5, None, True, "é"], [[1, 2.5, None, True, "é"]]),
    ],
)
async def test_handlers_of_every_kind_are_served(
    pair: Pair, handler: Any, request_value: Any, expected: list[Any]
) -> None:
    client = await pair.serve(handler)
    assert await data_of(await client.generate(request_value)) == expected


@pytest.mark.parametrize(
    "request_value",
    [
        Question(text="hi", times=2),
        Question(text="hi", times=2).model_dump_json(),
        {"text": "hi", "times": 2},
    ],
)
async def test_a_model_is_read_from_a_model_json_or_a_dict(pair: Pair, request_value: Any) -> None:
    client = await pair.serve(words_of_a_model)
    answers = await data_of(await client.generate(request_value, context=Context("r7")))
    assert answers == [{"text": "hi r7"}] * 2


async def test_a_request_that_does_not_fit_the_model_names_the_field(pair: Pair) -> None:
    client = await pair.serve(words_of_a_model)
    with pytest.raises(InvalidRequestError, match="times") as caught:
        await data_of(await client.generate({"text": "hi", "times": "many"}))
    assert caught.value.param == "times"


async def test_dataclasses_and_enums_are_sent_as_plain_values(pair: Pair) -> None:
    async def shapes(request: Any) -> AsyncIterator[Any]:
        yield Point(3)
        yield [Color.RED]

    client = await pair.serve(shapes)
    assert await data_of(await client.generate(None)) == [{"x": 3}, ["red"]]


async def test_what_cannot_be_sent_is_an_error_on_the_side_that_sends_it(pair: Pair) -> None:
    async def unsendable(request: Any) -> object:
        return object()

    client = await pair.serve(unsendable)
    with pytest.raises(InvalidRequestError, match="object cannot be sent"):
        await client.generate(object())
    with pytest.raises(InternalError):
        await data_of(await client.generate(1))


@pytest.mark.parametrize(
    ("raised", "caught"),
    [
        (GeneratorExit("going away"), IncompleteError),
        (StreamIncomplete("going away"), IncompleteError),
        (OverloadedError("full"), OverloadedError),
        (ValueError("a secret"), InternalError),
    ],
)
async def test_a_handlers_error_reaches_the_caller_after_its_items(
    pair: Pair, raised: BaseException, caught: type[TandemError]
) -> None:
    async def breaks(request: Any) -> AsyncIterator[int]:
        yield 1
        raise raised

    client = await pair.serve(breaks)
    heard = []
    with pytest.raises(caught) as error:
        async for item in await client.generate(None):
            heard.append(item.data())  # noqa: PERF401 - kept when the iteration raises
    assert heard == [1]
    assert type(error.value) is caught
    assert "secret" not in error.value.message


@pytest.mark.parametrize("handler", [lambda: None, "not a function"])
async def test_a_handler_that_takes_no_request_is_refused(pair: Pair, handler: Any) -> None:
    with pytest.raises((ConfigError, TypeError)):
        pair.worker.endpoint("a.b.c").serve(handler)


async def test_an_endpoint_is_served_once_by_a_process(pair: Pair) -> None:
    await pair.serve(words)
    with pytest.raises(ConfigError, match="served by this process already"):
        pair.worker.endpoint("a.b.c").serve(words)


async def test_names_may_have_parts_and_come_in_three_spellings(pair: Pair) -> None:
    client = await pair.serve(one_word, "dyn://shop.Frontend.chat/completions")
    component = pair.caller.namespace("shop").component("Frontend")
    await component.create_service()
    for endpoint in (
        component.endpoint("chat/completions"),
        pair.caller.endpoint("shop/Frontend/chat/completions"),
    ):
        assert endpoint.address == client.address
    assert await data_of(await client.generate("x")) == ["X"]


async def test_a_caller_that_reads_slowly_holds_the_handler_back(pair: Pair) -> None:
    num_yielded = 0

    async def flood(request: Any) -> AsyncIterator[int]:
        nonlocal num_yielded
        for number in range(4 * WINDOW_ITEMS):
            num_yielded += 1
            yield number

    client = await pair.serve(flood)
    responses = await client.generate(None, annotated=False)
    await eventually(lambda: num_yielded >= WINDOW_ITEMS)
    for _ in range(20):
        await asyncio.sleep(0)
    assert num_yielded <= WINDOW_ITEMS + 1
    assert [item async for item in responses] == list(range(4 * WINDOW_ITEMS))


async def test_a_generator_that_never_waits_lets_its_items_out_and_others_run(pair: Pair) -> None:
    arrived = asyncio.Event()

    async def hurried(request: Any) -> AsyncIterator[int]:
        for number in range(WINDOW_ITEMS):
            if number == WINDOW_ITEMS - 1:
                assert arrived.is_set(), "nothing arrived while it ran"
            yield number

    client = await pair.serve(hurried)
    async for _ in await client.generate(None):
        arrived.set()
    assert arrived.is_set()


# ---- stop, kill and loss ----------------------------------------------------------------------


async def test_a_stop_reaches_the_handler_and_its_last_items_arrive(pair: Pair) -> None:
    seen, context = Seen(), Context()
    client = await pair.serve(seen.generate)
    heard = []
    async for item in await client.generate(None, annotated=False, context=context):
        heard.append(item)
        context.stop_generating()
    assert heard[-1] == "the end" and len(heard) > 1
    assert seen.contexts[0].is_stopped() and not seen.contexts[0].is_killed()


async def test_a_kill_closes_the_generator_at_its_next_yield(pair: Pair) -> None:
    seen, context = Seen(heeds_stop=False), Context()
    client = await pair.serve(seen.generate)
    responses = await client.generate(None, context=context)
    await anext(responses)
    context.kill()
    with pytest.raises(TandemError, match="killed"):
        await data_of(responses)
    await asyncio.wait_for(seen.is_closed.wait(), PATIENCE_S)
    assert seen.contexts[0].is_killed() and seen.contexts[0].is_stopped()


async def test_an_answer_dropped_in_the_middle_kills_the_request(pair: Pair) -> None:
    seen = Seen(heeds_stop=False)
    client = await pair.serve(seen.generate)
    async for _ in await client.generate(None):
        break
    await asyncio.wait_for(seen.is_closed.wait(), PATIENCE_S)
    assert seen.contexts[0].is_killed()


async def test_a_lost_connection_kills_the_request(pair: Pair) -> None:
    seen = Seen()
    client = await pair.serve(seen.generate)
    responses = await client.generate(None)
    await anext(responses)
    await pair.caller.client.close()
    await asyncio.wait_for(seen.has_ended.wait(), PATIENCE_S)
    assert seen.contexts[0].is_killed()


async def test_a_handler_that_waits_learns_of_both_ends(pair: Pair) -> None:
    ended: list[tuple[bool, bool]] = []

    async def waits(request: Any, context: Context) -> AsyncIterator[str]:
        yield "begun"
        await context.async_killed_or_stopped()
        ended.append((context.is_stopped(), context.is_killed()))

    client = await pair.serve(waits)
    for end in (Context.stop_generating, Context.kill):
        context = Context()
        responses = await client.generate(None, context=context)
        await anext(responses)
        end(context)
        await eventually(lambda: len(ended) == 1)
        assert ended.pop() == (True, end is Context.kill)


async def test_calls_made_with_the_context_are_stopped_and_killed_with_it(pair: Pair) -> None:
    inner = Seen()
    inside = await pair.serve(inner.generate, "a.inner.c")

    async def outer(request: Any, context: Context) -> AsyncIterator[Any]:
        async for item in await inside.generate(request, annotated=False, context=context):
            yield item

    outside = await pair.serve(outer, "a.outer.c")
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    context = Context("r9", headers=headers)
    responses = await outside.generate(None, annotated=False, context=context)
    await anext(responses)
    context.stop_generating()
    assert [item async for item in responses][-1] == "the end"
    assert inner.contexts[0].id() == "r9" and inner.contexts[0].headers == headers

    responses = await outside.generate(None, context=(context := Context()))
    await anext(responses)
    context.kill()
    await eventually(lambda: len(inner.contexts) == 2 and inner.contexts[1].is_killed())


# ---- what is measured -------------------------------------------------------------------------


async def test_an_endpoint_counts_what_it_did_under_the_authors_labels(pair: Pair) -> None:
    async def fails_on_zero(request: int) -> float:
        return 1 / request

    client = await pair.serve(fails_on_zero, "count.me.now", metrics_labels=[("team", "blue")])
    await data_of(await client.generate(2))
    with pytest.raises(InternalError):
        await data_of(await client.generate(0))
    labels = {"endpoint": "count.me.now", "team": "blue"}

    def value(name: str) -> float | None:
        return REGISTRY.get_sample_value(f"tandem_endpoint_{name}", labels)

    assert value("requests_total") == 2
    assert value("failures_total") == 1
    assert value("running") == 0
    assert (value("seconds_total") or 0) > 0


async def test_an_instance_that_fails_its_health_check_hides_until_it_passes(pair: Pair) -> None:
    is_ill = False
    asked = []

    async def patient(request: dict[str, Any]) -> AsyncIterator[str]:
        asked.append(request)
        if is_ill:
            raise RuntimeError("ill")
        yield "well"

    pair.worker.canary_interval_s = 0.02
    client = await pair.serve(patient, health_check_payload={"probe": 1})
    is_ill = True
    await eventually(lambda: client.instance_ids() == [])
    is_ill = False
    await eventually(lambda: client.instance_ids() == [pair.worker.instance_id])
    assert {"probe": 1} in asked
    assert await data_of(await client.generate({})) == ["well"]
