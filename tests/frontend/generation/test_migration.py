"""Workers that fail in the middle of an answer: the client must not be able to tell."""

from collections import Counter
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest

from tandem.frontend.config import FrontendConfig
from tandem.frontend.generation.failover import Attempts
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import (
    CapacityError,
    ConnectionLostError,
    IncompleteError,
    InternalError,
    OverloadedError,
    ProtocolError,
    TandemError,
    UnavailableError,
)
from tandem.runtime.plane.server import Responder
from tandem.runtime.wire.messages import FinishReason, GenerateRequest, TokenDelta, encode
from tests.frontend.frontend_stack import (
    ANSWER,
    REPORT,
    FakeWorker,
    Script,
    Stack,
    answer_with,
    error_event,
    prompt_tokens,
    token_ids,
)
from tests.frontend.generation.cut_answers import TEXT_AND_LOGPROBS, Cut, ask, telling
from tests.services import eventually

NUM_TOKENS = len(token_ids(ANSWER))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("path", "body"), TEXT_AND_LOGPROBS)
async def test_an_answer_cut_anywhere_goes_on_as_if_nothing_had_happened(
    pair: Stack, path: str, body: dict[str, Any], stream: bool
) -> None:
    for worker in pair.workers:
        worker.script = telling(ANSWER)
    uncut = await ask(pair, path, body, stream=stream)
    assert uncut["choices"][0]["text"] == ANSWER
    errors = cycle([IncompleteError("going"), UnavailableError("stopping"), None])
    for num_tokens, error in zip([0, 0, 0, *range(1, NUM_TOKENS + 1)], errors, strict=False):
        cut = Cut(pair, num_tokens, error)
        assert await ask(pair, path, body, stream=stream) == uncut
        assert sum(cut.num_cuts.values()) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_stop_string_is_found_across_every_seam(pair: Stack, stream: bool) -> None:
    path, body = TEXT_AND_LOGPROBS[1]
    text = "abcabcabcabcabc"  # a token each
    stops = {"stop": ["cab", "never"]}
    for worker in pair.workers:
        worker.script = telling(text)
    uncut = await ask(pair, path, body, stream=stream, **stops)
    assert uncut["choices"][0]["text"] == "ab"
    late = await ask(pair, path, body, stream=stream, min_tokens=4, **stops)
    assert late["choices"][0]["text"] == "abcab"
    for num_tokens in range(len(token_ids(text))):
        Cut(pair, num_tokens, IncompleteError("going"), text)
        assert await ask(pair, path, body, stream=stream, **stops) == uncut
        assert await ask(pair, path, body, stream=stream, min_tokens=4, **stops) == late


async def test_the_next_worker_is_asked_to_go_on_behind_all_that_was_said(pair: Stack) -> None:
    """Also behind the token that came in one frame with the failure."""
    fields = {
        "temperature": 0.7,
        "seed": 5,
        "presence_penalty": 0.5,
        "min_tokens": 3,
        "cache_salt": "tenant",
    }
    for num_tokens in (0, 1, 4):
        Cut(pair, num_tokens, IncompleteError("going"))
        await ask(pair, "/v1/completions", {"prompt": "Hi", "max_tokens": 40, **fields})
        requests = [request for worker in pair.workers for request in worker.requests]
        first, second = sorted(requests, key=lambda each: len(each.token_ids))
        said = token_ids(ANSWER)[:num_tokens]
        assert prompt_tokens(second) == token_ids("Hi") + said
        assert second.num_generated == num_tokens and first.num_generated == 0
        assert second.stop == first.stop and second.sampling == first.sampling
        assert second.request_id == first.request_id and second.cache_salt == "tenant"
        assert [len(worker.requests) for worker in pair.workers] == [1, 1]


async def test_an_answer_that_only_lacked_its_end_is_ended_without_another_worker(
    pair: Stack,
) -> None:
    Cut(pair, 6, IncompleteError("going"))
    for stream in (False, True):
        answer = await ask(pair, "/v1/completions", {"prompt": "Hi"}, max_tokens=6, stream=stream)
        assert answer["choices"][0]["reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 6
    assert sum(len(worker.requests) for worker in pair.workers) == 2


async def test_choices_of_one_request_go_on_each_by_itself(pair: Stack) -> None:
    path, body = TEXT_AND_LOGPROBS[3]
    for worker in pair.workers:
        worker.script = telling(ANSWER)
    uncut = await ask(pair, path, body, n=3, stream=True)
    cut = Cut(pair, 4, IncompleteError("going"))
    assert await ask(pair, path, body, n=3, stream=True) == uncut
    assert len(cut.num_cuts) == 3


async def test_what_the_first_worker_told_stays(pair: Stack) -> None:
    Cut(pair, 2, IncompleteError("going"))
    response = await pair.complete(headers={"x-tandem-timeline": "true"})
    (first,) = [each for each in pair.workers if each.requests[0].num_generated == 0]
    assert response.headers["x-tandem-decode-instance"] == first.instance_id
    assert response.headers["x-tandem-prefill"] == REPORT.place
    assert response.json()["choices"][0]["tandem"]["timeline_ms"] == REPORT.timeline_ms
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert 'prefill_total{model="test/model",place="local"} 1.0' in pair.metrics()


async def test_migrations_are_counted_by_whether_anything_was_said(pair: Stack) -> None:
    for num_tokens in (0, 3):
        Cut(pair, num_tokens, IncompleteError("going"))
        await pair.chat()
    for kind in ("new_request", "ongoing"):
        assert (
            f'tandem_frontend_migrations_total{{kind="{kind}",model="test/model"}} 1.0'
            in pair.metrics()
        )
    assert 'migration_gap_seconds_count{model="test/model"} 1.0' in pair.metrics()


async def failing_times(
    stack: Stack, times: int, error: TandemError | None = None, **fields: object
) -> str:
    """The end of a stream whose workers fail `times` times, a token each."""
    Cut(stack, 1, error or ConnectionLostError("killed")).times = times
    response = await stack.chat(stream=True, **fields)
    return response.text.rstrip().rpartition("\n\n")[2]


async def test_an_answer_moves_as_often_as_the_limit_says_and_no_more(pair: Stack) -> None:
    assert await failing_times(pair, 3) == "data: [DONE]"
    assert "error id" in await failing_times(pair, 4)


async def test_handovers_of_healthy_workers_do_not_count(pair: Stack) -> None:
    assert await failing_times(pair, 6, IncompleteError("going")) == "data: [DONE]"
    Cut(pair, 0, IncompleteError("going")).times = 4  # without a token each counts
    assert (await pair.chat()).status_code == 503


async def test_a_limit_of_zero_turns_it_off_also_before_the_first_token() -> None:
    config = FrontendConfig(port=0, migration_limit=0, exclude_s=0)
    async with Stack(num_workers=2, config=config) as stack:
        Cut(stack, 0, IncompleteError("going"))
        assert (await stack.chat()).status_code == 503
        assert "error id" in await failing_times(stack, 1, IncompleteError("going"))
        assert sum(len(worker.requests) for worker in stack.workers) == 1


async def test_a_models_own_limit_stands_over_the_frontends() -> None:
    async with Stack(num_workers=0, config=FrontendConfig(port=0, exclude_s=0)) as stack:
        for _ in range(2):
            await stack.add_worker(migration_limit=1)
        await eventually(lambda: stack.num_known == 2)
        assert await failing_times(stack, 1) == "data: [DONE]"
        assert "error id" in await failing_times(stack, 2)


@pytest.mark.parametrize("error", [InternalError("poison"), CapacityError("too large")])
async def test_what_would_fail_anywhere_is_not_tried_elsewhere(
    pair: Stack, error: TandemError
) -> None:
    Cut(pair, 2, error)
    response = await pair.chat(stream=True)
    assert '"error"' in response.text and "[DONE]" not in response.text
    assert sum(len(worker.requests) for worker in pair.workers) == 1


async def test_a_worker_that_gave_one_stream_up_is_asked_again_if_it_is_alone(stack: Stack) -> None:
    Cut(stack, 2, IncompleteError("going"))
    assert (await stack.chat()).json()["choices"][0]["message"]["content"] == ANSWER
    assert (await stack.chat()).status_code == 200  # and new requests go on as before


@pytest.mark.parametrize("ending", ["cancelled", None])
async def test_a_sequence_that_a_worker_ends_unfinished_goes_on_elsewhere(
    pair: Stack, ending: FinishReason | None
) -> None:
    """It says that it was cancelled, which nobody did, or it ends without a word."""
    cut: Counter[str] = Counter()

    async def script(
        request: GenerateRequest, context: RequestContext, responder: Responder
    ) -> None:
        cut[request.request_id] += 1
        if cut[request.request_id] > 1:
            await answer_with(ANSWER)(request, context, responder)
            return
        first, second = token_ids(ANSWER)[:2]
        responder.send(encode(TokenDelta([first], prefill=REPORT)))
        responder.send(encode(TokenDelta([second], ending)))

    for worker in pair.workers:
        worker.script = script
    for stream in (False, True):
        answer = await ask(pair, *TEXT_AND_LOGPROBS[0], stream=stream)
        assert answer["choices"][0]["text"] == ANSWER


@pytest.mark.parametrize(
    ("num_tokens", "error"),
    [(3, None), (0, UnavailableError("draining"))],
    ids=["the end of an answer", "the refusal of one that is leaving"],
)
async def test_a_worker_in_doubt_is_better_than(num_tokens: int, error: TandemError | None) -> None:
    async with Stack(num_workers=2, config=FrontendConfig(port=0, exclude_s=60)) as stack:
        Cut(stack, 0, UnavailableError("a bad moment"))
        assert (await stack.chat()).status_code == 200  # one of the two is left out from now on
        Cut(stack, num_tokens, error)
        assert (await stack.chat()).json()["choices"][0]["message"]["content"] == ANSWER
        assert [len(worker.requests) for worker in stack.workers] == [1, 1]


async def test_a_worker_that_failed_an_answer_long_since_may_go_on_with_it(pair: Stack) -> None:
    """As after a pause of its machine: since then another one has answered, and died."""
    cut = Cut(pair, 3, None)
    first_asked: list[FakeWorker] = []

    def failing_first(worker: FakeWorker) -> Script:
        async def script(
            request: GenerateRequest, context: RequestContext, responder: Responder
        ) -> None:
            first_asked.append(worker)
            if len(first_asked) == 1:
                raise UnavailableError("a bad moment")
            await cut.script_of(worker)(request, context, responder)

        return script

    for worker in pair.workers:
        worker.script = failing_first(worker)
    answer = await ask(pair, *TEXT_AND_LOGPROBS[0])
    assert answer["choices"][0]["text"] == ANSWER
    failed, died, went_on = first_asked
    assert failed is went_on and failed is not died


async def test_no_worker_with_other_weights_ends_an_answer() -> None:
    """The one before it leaves while it answers: better no end than another model's."""
    config = FrontendConfig(port=0, exclude_s=0, migration_wait_s=0)
    async with Stack(num_workers=0, config=config) as stack:
        old = await stack.add_worker(weights_digest="old")
        await eventually(lambda: bool(stack.server.catalog.models))
        new = await stack.add_worker(weights_digest="new")

        async def leave(
            _request: GenerateRequest, _context: RequestContext, responder: Responder
        ) -> None:
            responder.send(encode(TokenDelta(token_ids("H"), prefill=REPORT)))
            await old.discovery.close()
            await eventually(
                lambda: list(stack.server.catalog.models[0].instances) == [new.instance_id]
            )
            raise IncompleteError("going")

        old.script = leave
        response = await stack.chat(stream=True)
        assert error_event(response.text)["type"] == "server_error"
        assert not new.requests
        assert (await stack.chat()).status_code == 200 and len(new.requests) == 1


@pytest.mark.parametrize("make", [ProtocolError, UnavailableError, OverloadedError])
def test_a_worker_that_failed_a_choice_is_not_asked_for_it_again(
    make: Callable[[str], TandemError],
) -> None:
    attempts = Attempts(limit=2)
    attempts.failed("a", make("it failed"))
    assert attempts.eligible(["a", "b"]) == ["b"]
    assert attempts.eligible(["a"]) == []
    attempts.begun()
    assert attempts.eligible(["a"]) == ["a"]


@pytest.mark.parametrize("make", [IncompleteError, ConnectionLostError])
def test_one_that_gave_a_choice_up_or_was_lost_comes_last(
    make: Callable[[str], TandemError],
) -> None:
    attempts = Attempts(limit=2)
    attempts.failed("a", make("going"))
    assert attempts.eligible(["a", "b"]) == ["b"]
    attempts.failed("b", UnavailableError("stopping"))
    assert attempts.eligible(["a", "b"]) == ["a"]
