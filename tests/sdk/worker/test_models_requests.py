"""What handlers of token and text models are given, and what they may give."""

import math
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.messages import (
    GenerateRequest,
    Grammar,
    PrefillReport,
    SamplingParams,
    StopConditions,
    TextRequest,
    TokenDelta,
    TokenLogprobs,
    pack_tokens,
)
from tandem.sdk.wire.text_requests import TextCodec
from tandem.sdk.wire.token_requests import TokenCodec


def codec(logprobs: int | None = None, num_generated: int = 0) -> TokenCodec:
    return TokenCodec(
        GenerateRequest(
            request_id="r",
            model="m",
            token_ids=pack_tokens([1, 2, 3, 4]),
            sampling=SamplingParams(
                temperature=0.5, seed=9, logit_bias={3: 1.0}, logprobs=logprobs
            ),
            stop=StopConditions(max_tokens=10, min_tokens=1, stop_token_ids=[7]),
            deadline_ms=1000,
            cache_salt="tenant",
            num_generated=num_generated,
        )
    )


@pytest.mark.parametrize(
    ("sampling", "max_tokens", "field"),
    [
        (SamplingParams(logprobs=1, prompt_logprobs=True), 5, "echo"),
        (SamplingParams(), 0, "max_tokens"),
    ],
)
def test_a_prompt_to_score_is_refused(
    sampling: SamplingParams, max_tokens: int, field: str
) -> None:
    stop = StopConditions(max_tokens=max_tokens)
    with pytest.raises(InvalidRequestError, match=field) as caught:
        TokenCodec(GenerateRequest("r", "m", pack_tokens([1]), sampling, stop, 1000))
    assert caught.value.param == field


def delta(item: Any, **asked: Any) -> TokenDelta:
    return msgspec.msgpack.decode(codec(**asked).encode(item), type=TokenDelta)


def test_a_request_has_its_grammar_by_kind_and_source() -> None:
    grammar, stop = Grammar("regex", "[ab]+"), StopConditions(max_tokens=5)
    message = GenerateRequest("r", "m", pack_tokens([1]), SamplingParams(), stop, 1000)
    assert TokenCodec(message).request["sampling_options"]["grammar"] is None
    request = TokenCodec(msgspec.structs.replace(message, grammar=grammar)).request
    assert request["sampling_options"]["grammar"] == {"kind": "regex", "source": "[ab]+"}


def test_a_resumed_request_has_the_generated_tokens_and_reduced_limits() -> None:
    request = codec(num_generated=2).request
    assert request["token_ids"] == [1, 2, 3, 4]
    assert request["extra_args"] == {"num_generated": 2, "cache_salt": "tenant"}
    assert request["stop_conditions"] == {
        "max_tokens": 8,
        "min_tokens": 0,
        "stop_token_ids": [7],
        "ignore_eos": False,
    }


def test_sampling_comes_under_the_names_that_engines_know() -> None:
    request = codec(logprobs=2).request
    assert request["output_options"] == {"logprobs": 2}
    assert request["sampling_options"] == {
        "n": 1, "temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {3: 1.0}, "seed": 9,
        "grammar": None,
    }  # fmt: skip


def test_a_chunk_may_be_a_dict_json_or_a_pydantic_model() -> None:
    class Chunk(BaseModel):
        token_ids: list[int]
        finish_reason: str | None = None

    expected = TokenDelta([5], "length")
    assert delta({"token_ids": (5,), "index": 0, "finish_reason": "length"}) == expected
    assert delta('{"token_ids": [5], "finish_reason": "length"}') == expected
    assert delta(Chunk(token_ids=[5], finish_reason="length")) == expected


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("eos", "stop"),
        ("abort", "cancelled"),
        ("Length", "length"),
        ("error: out of memory", "error"),
    ],
)
def test_finish_reasons_of_engines_become_ours(theirs: str, ours: str) -> None:
    assert delta({"token_ids": [], "finish_reason": theirs}).finish_reason == ours


def test_logprobs_go_along_sorted_and_only_as_many_as_were_asked_for() -> None:
    top = [{"token_id": 6, "logprob": -3.0}, {"token_id": 5, "logprob": -0.5, "rank": 1}]
    chunk = {"token_ids": [5], "log_probs": [-0.5], "top_logprobs": [top]}
    assert delta(chunk, logprobs=1).logprobs == [TokenLogprobs(-0.5, [(5, -0.5)])]
    assert delta(chunk, logprobs=0).logprobs == [TokenLogprobs(-0.5)]
    assert delta(chunk).logprobs is None
    assert delta(chunk | {"log_probs": [None]}, logprobs=1).logprobs is None
    excluded = chunk | {"log_probs": [-math.inf], "top_logprobs": [[top[0] | {"logprob": -1e9}]]}
    assert delta(excluded, logprobs=1).logprobs == [TokenLogprobs(-9999.0, [(6, -9999.0)])]


def test_the_place_of_a_prompt_goes_along() -> None:
    chunk = {"token_ids": [5], "prefill": {"place": "remote", "reason": "long"}}
    assert delta(chunk).prefill == PrefillReport("remote", "long")
    whole = delta(chunk | {"prefill": PrefillReport("local", "short"), "finish_reason": "stop"})
    assert whole.prefill == PrefillReport("local", "short")
    with pytest.raises(ValueError, match="`prefill`"):
        delta({"token_ids": [5], "prefill": {"place": "moon", "reason": ""}})


def test_the_token_that_ended_an_answer_is_no_part_of_it() -> None:
    chunk = {"token_ids": [5, 7], "log_probs": [-1, -2], "finish_reason": "stop", "stop_reason": 7}
    ended = delta(chunk, logprobs=0)
    assert (ended.token_ids, ended.stop_token_id) == ([5], 7)
    assert ended.logprobs == [TokenLogprobs(-1.0)]
    assert delta(chunk | {"stop_reason": "a string"}).token_ids == [5, 7]


@pytest.mark.parametrize(
    ("item", "named"),
    [
        ({"token_ids": "abc"}, "token_ids"),
        ({"token_ids": 5}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [1], "index": 1}, "index"),
        ({"token_ids": [], "finish_reason": "bored"}, "finish_reason"),
        ({"token_ids": [1], "num_prompt_tokens": -1}, "num_prompt_tokens"),
        ({"token_ids": [1], "num_prompt_tokens": 2.5}, "num_prompt_tokens"),
        ({"token_ids": [1], "log_probs": []}, "log_probs"),
        ({"token_ids": [1], "log_probs": [math.nan]}, "log probability"),
        ({"token_ids": [1], "log_probs": [math.inf]}, "log probability"),
        ({"token_ids": [1], "prefill": PrefillReport("local", "", -1)}, "num_cached_tokens"),
        ({"token_ids": [1], "log_probs": [-1], "top_logprobs": [[], []]}, "top_logprobs"),
        ({"token_ids": [1], "log_probs": [-1], "top_logprobs": [[{}]]}, "top_logprobs"),
        ("not json", "JSON"),
        (5, "int"),
    ],
)
def test_a_wrong_chunk_is_refused_by_the_key(item: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        delta(item, logprobs=1)


def test_nothing_comes_after_the_terminal_chunk_and_one_always_comes() -> None:
    ended = codec()
    ended.encode({"token_ids": [1], "finish_reason": "stop"})
    assert ended.end() is None
    with pytest.raises(ValueError, match="finish_reason"):
        ended.encode({"token_ids": [1]})
    for num_tokens, reason in ((3, "stop"), (10, "length")):
        open_end = codec()
        open_end.encode({"token_ids": [1] * num_tokens})
        last = open_end.end()
        assert last is not None
        assert msgspec.msgpack.decode(last, type=TokenDelta) == TokenDelta([], reason)


def text_codec(kind: Any = "chat", body: bytes = b'{"messages": []}') -> TextCodec:
    return TextCodec(TextRequest("r", "m", kind, body, 1000))


def test_a_text_model_may_give_openai_objects_of_any_make() -> None:
    class Whole(BaseModel):
        choices: list[int]

    chat = text_codec()
    assert chat.request == {"messages": []}
    for item in ({"choices": [1]}, '{"choices":[1]}', Whole(choices=[1])):
        assert chat.encode(item) == b'{"choices":[1]}'
    assert chat.end() is None


def test_pieces_of_text_become_chunks_of_the_route() -> None:
    piece = {"text": "a", "finish_reason": "abort", "completion_usage": {"total_tokens": 1}}
    choice = {"index": 0, "logprobs": None, "finish_reason": "cancelled"}
    usage = {"total_tokens": 1}
    assert msgspec.json.decode(text_codec().encode(piece)) == {
        "choices": [choice | {"delta": {"content": "a"}}],
        "usage": usage,
    }
    assert msgspec.json.decode(text_codec("completions").encode(piece)) == {
        "choices": [choice | {"text": "a"}],
        "usage": usage,
    }


@pytest.mark.parametrize("item", ["plain", 5, {"text": 5}, {}])
def test_what_is_neither_is_refused(item: Any) -> None:
    with pytest.raises(ValueError, match="text model"):
        text_codec().encode(item)


def test_a_body_that_is_not_json_is_the_callers_fault() -> None:
    with pytest.raises(InvalidRequestError, match="malformed JSON"):
        text_codec(body=b"{")
