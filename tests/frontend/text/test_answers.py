"""Chunks of text models put together, piece by piece."""

import json
from typing import Any

from tandem.frontend.chat.responses import ResponseHead
from tandem.frontend.text.answers import WholeText, as_chunk, read_answer
from tests.frontend.text.text_stack import delta

HEAD = ResponseHead("chatcmpl-1", 7, "m", is_chat=True, with_usage=False)


def whole(*chunks: dict[str, Any]) -> dict[str, Any]:
    text = WholeText(HEAD)
    for chunk in chunks:
        text.add(read_answer(json.dumps(chunk).encode(), HEAD))
    answer: dict[str, Any] = json.loads(text.end())
    return answer


def test_tool_calls_are_put_together_by_their_index() -> None:
    def call(index: int, **fields: Any) -> dict[str, Any]:
        return delta(None, tool_calls=[{"index": index, **fields}])

    message = whole(
        call(0, id="a", type="function", function={"name": "look", "arguments": '{"x"'}),
        call(0, function={"arguments": ":1}"}),
        call(1, id="b", type="function", function={"name": "go", "arguments": "{}"}),
    )["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"x":1}'}},
        {"id": "b", "type": "function", "function": {"name": "go", "arguments": "{}"}},
    ]


def test_tool_calls_of_a_whole_answer_are_numbered_in_its_chunk() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}, {"id": "b"}]}
    answer = read_answer(json.dumps({"choices": [{"message": message}]}).encode(), HEAD)
    (choice,) = as_chunk(answer, HEAD)["choices"]
    assert choice["delta"]["tool_calls"] == [{"index": 0, "id": "a"}, {"index": 1, "id": "b"}]


def test_logprobs_and_thoughts_are_joined_in_order() -> None:
    def chunk(text: str) -> dict[str, Any]:
        made = delta(text, reasoning_content=text.upper())
        made["choices"][0]["logprobs"] = {"content": [{"token": text}]}
        return made

    (choice,) = whole(chunk("a"), chunk("b"))["choices"]
    assert choice["message"]["content"] == "ab"
    assert choice["message"]["reasoning_content"] == "AB"
    assert choice["logprobs"] == {"content": [{"token": "a"}, {"token": "b"}]}


def test_what_the_worker_says_of_itself_is_kept() -> None:
    answer = whole({"id": "own", "system_fingerprint": "fp", **delta("a", "length")})
    assert (answer["id"], answer["system_fingerprint"], answer["model"]) == ("own", "fp", "m")
    assert answer["choices"][0]["finish_reason"] == "length"
