"""The fields that clients written for vLLM send: honored, or refused by name."""

from typing import Any

import pytest

from tests.frontend.frontend_stack import (
    ANSWER,
    Stack,
    answer_with,
    byte_level_tokenizer,
    choices_of,
    events_of,
    prompt_of,
    prompt_tokens,
    text_of,
    token_ids,
)
from tests.frontend.generation.test_choices import scored

TAGGED = "Hi<|im_start|>there<added word>"
CALLING = {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}


async def test_special_tokens_are_left_out_unless_they_are_wanted(stack: Stack) -> None:
    for stream in [True, False]:
        stack.worker.script = answer_with(TAGGED)
        for skip, text in (
            (None, "Hithere<added word>"),
            (True, "Hithere<added word>"),
            (False, TAGGED),
        ):
            answer = await stack.complete(skip_special_tokens=skip, stream=stream)
            assert text_of(answer) == text


async def test_a_stop_string_is_part_of_the_answer_if_it_is_wanted(stack: Stack) -> None:
    for stream in [True, False]:
        for wanted, text in ((False, "Hello w"), (True, "Hello wör")):
            answer = await stack.complete(
                stop=["ör"], include_stop_str_in_output=wanted, stream=stream
            )
            assert text_of(answer) == text


async def test_continuous_usage_counts_in_every_chunk(stack: Stack) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events: Any = events_of(await stack.chat(stream=True, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[0] <= 1 < counts[-1]
    assert counts[-1] == counts[-2] == len(token_ids(ANSWER)) + 1
    assert {event["usage"]["prompt_tokens"] for event in events} == {21}


async def test_a_prompt_is_cut_at_its_beginning(stack: Stack) -> None:
    prompt = token_ids("abcdefgh")
    for given in (prompt, "abcdefgh"):
        answer = await stack.complete(prompt=given, truncate_prompt_tokens=3, echo=True)
        assert prompt_tokens(stack.worker.requests[-1]) == prompt[-3:]
        assert answer.json()["choices"][0]["text"].startswith("fgh")
    long = token_ids("the world " * 100)
    answer = await stack.complete(prompt=long, truncate_prompt_tokens=-1, max_tokens=20)
    assert answer.status_code == 200
    assert prompt_tokens(stack.worker.requests[-1]) == long[-108:]
    await stack.chat(truncate_prompt_tokens=5)
    assert len(prompt_tokens(stack.worker.requests[-1])) == 5


async def test_a_chat_can_end_without_a_prompt_for_the_answer(stack: Stack) -> None:
    await stack.chat(add_generation_prompt=False)
    assert prompt_of(stack.worker.requests[-1]) == "<|im_start|>user\nHi<|im_end|>\n"


async def test_the_last_message_can_be_continued(stack: Stack) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    await stack.chat(messages=messages, continue_final_message=True)
    assert prompt_of(stack.worker.requests[-1]).endswith("<|im_start|>assistant\nWell, ")


@pytest.mark.parametrize("num_logprobs", [None, 1])
async def test_a_prompt_is_scored_in_the_shape_of_vllm(
    stack: Stack, num_logprobs: int | None
) -> None:
    stack.worker.script = scored
    answer = await stack.complete(prompt="abc", prompt_logprobs=2, logprobs=num_logprobs)
    (choice,) = answer.json()["choices"]
    a, b, c = token_ids("a")[0], token_ids("b")[0], token_ids("c")[0]
    first = byte_level_tokenizer().id_to_token(0)
    assert choice["prompt_logprobs"] == [
        None,
        {
            str(b): {"logprob": -1.0, "rank": 1, "decoded_token": "b"},
            "0": {"logprob": -100.0, "rank": 2, "decoded_token": first},
        },
        {
            str(c): {"logprob": -2.0, "rank": 1, "decoded_token": "c"},
            "0": {"logprob": -100.0, "rank": 2, "decoded_token": first},
        },
    ]
    assert a and choice["text"] == ""
    if num_logprobs is None:
        assert choice["logprobs"] is None
    else:
        assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [1]
    chat = (await stack.chat(prompt_logprobs=0)).json()
    assert len(chat["prompt_logprobs"]) == 21 and chat["choices"][0]["logprobs"] is None
    assert [len(each) for each in chat["prompt_logprobs"][1:]] == [1] * 20
    assert (
        "prompt_logprobs" not in (await stack.complete(prompt="abc", echo=True, logprobs=1)).json()
    )


async def test_token_ids_of_prompt_and_answer_come_with_it(stack: Stack) -> None:
    for is_chat in [True, False]:
        ask = stack.chat if is_chat else stack.complete
        whole: Any = (await ask(return_token_ids=True, n=2)).json()
        prompt = prompt_tokens(stack.worker.requests[-1])
        answer = [*token_ids(ANSWER), 0]
        assert [choice["token_ids"] for choice in whole["choices"]] == [answer, answer]
        holders = [whole] if is_chat else whole["choices"]
        assert [each["prompt_token_ids"] for each in holders] == [prompt] * len(holders)
        events: Any = events_of(await ask(return_token_ids=True, stream=True))
        choices = [event["choices"][0] for event in events]
        assert [each for choice in choices for each in choice.get("token_ids", [])] == answer
        holders = events if is_chat else choices
        assert holders[0]["prompt_token_ids"] == prompt
        assert not any("prompt_token_ids" in each for each in holders[1:])
        plain = (await ask()).json()
        assert "token_ids" not in plain["choices"][0] and "prompt_token_ids" not in plain


async def test_token_ids_end_with_the_one_that_completes_a_stop_string(stack: Stack) -> None:
    given = token_ids(ANSWER[: ANSWER.index("ör") + 2])
    for stream in (True, False):
        answer = await stack.complete(stop=["ör"], return_token_ids=True, stream=stream)
        choices = choices_of(answer)
        assert [each for choice in choices for each in choice.get("token_ids", [])] == given


async def test_tokens_are_listed_by_their_ids_if_that_is_wanted(stack: Stack) -> None:
    for stream in [True, False]:
        stack.worker.script = scored
        fields: Any = {"logprobs": 1, "return_tokens_as_token_ids": True, "echo": True}
        answer = await stack.complete(prompt="abc", stream=stream, **fields)
        listed = [choice["logprobs"] for choice in choices_of(answer)]
        tokens = [token for each in listed if each for token in each["tokens"]]
        ids = token_ids("abc")
        assert tokens == [f"token_id:{token_id}" for token_id in [*ids, ids[0]]]


WITHOUT_EFFECT: list[dict[str, Any]] = [
    {"spaces_between_special_tokens": False},
    {"use_beam_search": False},
    {"length_penalty": 2.0},
    {"priority": 3},
    {"add_special_tokens": True},
]


async def test_a_field_without_effect_is_accepted(stack: Stack) -> None:
    for fields in WITHOUT_EFFECT:
        for ask in (stack.chat, stack.complete):
            assert (await ask(**fields)).json()["choices"]


UNSUPPORTED: list[dict[str, Any]] = [
    {"bad_words": ["x"]}, {"allowed_token_ids": [1]},
    {"use_beam_search": True}, {"prompt_logprobs": 21}, {"prompt_logprobs": -1},
    {"prompt_logprobs": 1, "stream": True}, {"truncate_prompt_tokens": 0},
    {"documents": [{}] * 257}, {"chat_template": "x"}, {"echo": True},
    {"continue_final_message": True},
    {"continue_final_message": True, "messages": [CALLING]},
    {"stream_options": {"continuous_usage_stats": True}, "stream": True},
]  # fmt: skip


async def test_a_field_or_a_value_without_support_is_refused_by_name(stack: Stack) -> None:
    for fields in UNSUPPORTED:
        response = await stack.chat(**fields)
        assert response.status_code == 400, fields
        assert response.json()["error"]["param"].split(".")[0] == next(iter(fields))
    assert not stack.worker.requests
