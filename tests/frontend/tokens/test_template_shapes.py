"""Chat templates of all shapes render what transformers renders of the same conversation."""

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tandem.frontend.chat.requests import ChatRequest, parse
from tandem.frontend.config import FrontendConfig
from tandem.frontend.tokens.tokenizer import ModelText
from tandem.runtime.errors import InvalidRequestError
from tests.frontend.frontend_stack import byte_level_tokenizer, model_files
from tests.frontend.tokens.template_shapes import SHAPES

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ORACLE = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), **TOKENS)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "A city"}, "n": {"type": "integer"}},
    "required": ["city"],
}
WEATHER = {"name": "weather", "description": "Tell the weather", "parameters": PARAMETERS}
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"}
ANSWER = {"role": "assistant", "content": "Sunny."}
THOUGHT = ANSWER | {"reasoning_content": "Hm, Paris."}
Body = dict[str, Any]


def tools(**changes: object) -> list[Body]:
    function = {key: value for key, value in (WEATHER | changes).items() if value is not None}
    return [{"type": "function", "function": function}]


def call(arguments: str = '{"city": "Paris"}', number: int = 1) -> Body:
    function = {"name": "weather", "arguments": arguments}
    return {"id": f"call_abc{number}", "type": "function", "function": function}


def calls(*given: Body, **fields: object) -> Body:
    return {"role": "assistant", "content": None, "tool_calls": list(given or [call()])} | fields


def result(number: int = 1, content: str = "18") -> Body:
    return {"role": "tool", "tool_call_id": f"call_abc{number}", "content": content}


NESTED = '{"city": "Zürich <b>", "n": 1.5, "o": {"a": [1, null, true]}, "nothing": null}'
WITH_TOOLS: dict[str, list[Body]] = {
    "a question": [USER],
    "a system message": [SYSTEM, USER],
    "a call alone": [USER, calls(), result()],
    "a call with empty content": [USER, calls(content=""), result()],
    "a call and its answer": [SYSTEM, USER, calls(), result(), ANSWER, USER],
    "a call with text": [USER, calls(content="Let me look."), result()],
    "two calls": [USER, calls(call(), call('{"city": "Rome"}', 2)), result(), result(2)],
    "steps": [USER, calls(), result(), calls(call(number=2)), result(2), ANSWER, USER],
    "a call after reasoning": [USER, calls(reasoning_content="Hm."), result()],
    "a call after both": [USER, calls(content="So.", reasoning_content="Hm."), result()],
    "a call without arguments": [USER, calls(call("{}")), result()],
    "a call with nested arguments": [USER, calls(call(NESTED)), result()],
    "a result in JSON": [USER, calls(), result(content='{"t": 18}')],
}
CONVERSATIONS: dict[str, Body] = {
    name: {"messages": messages, "tools": tools()} for name, messages in WITH_TOOLS.items()
} | {
    "no tools": {"messages": [USER]},
    "a system message, no tools": {"messages": [SYSTEM, USER]},
    "turns": {"messages": [USER, ANSWER, USER, ANSWER, USER]},
    "turns after reasoning": {"messages": [USER, THOUGHT, USER]},
    "two questions": {"messages": [USER, USER]},
    "a call whose tool is gone": {"messages": [USER, calls(), result()]},
    "a tool without a description": {
        "messages": [USER, calls(), result()],
        "tools": tools(description=None),
    },
    "a tool without parameters": {"messages": [USER], "tools": tools(parameters=None)},
    "a switch": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    "documents": {"messages": [USER], "documents": [{"title": "One", "text": "Two"}]},
}
CONTINUED = ["<", "|", "end", "s", "", "Line 1.\n\n", "  Once", "Once upon a", "<think>a</think>b"]


@cache
def text_of(template: str) -> ModelText:
    config = json.dumps(TOKENS | {"chat_template": template}).encode()
    return ModelText(model_files().files | {"tokenizer_config.json": config})


def rendered(text: ModelText, body: Body) -> str | None:
    """The prompt that Tandem makes; None where it refuses."""
    chat = parse(ChatRequest, json.dumps({"model": "m"} | body).encode(), FrontendConfig())
    continues = bool(chat.continue_final_message)
    try:
        return text.render(
            chat.conversation(),
            chat.template_variables(),
            10**6,
            5.0,
            add_generation_prompt=not continues,
            continues_last=continues,
        )
    except InvalidRequestError as error:
        assert "takes no `tools`" not in error.message
        return None


def oracle(template: str, body: Body) -> str | None:
    """The prompt that transformers makes of the first form that it renders; None for none."""
    extra = {"documents": body.get("documents"), **body.get("chat_template_kwargs", {})}
    continues = body.get("continue_final_message", False)
    for messages, given in forms(body):
        try:
            return str(
                ORACLE.apply_chat_template(
                    messages,
                    tools=given,
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=not continues,
                    continue_final_message=continues,
                    **extra,
                )
            )
        except Exception:  # of any kind: a template is a program
            continue
    return None


def forms(body: Body) -> Iterator[tuple[list[Body], list[Body] | None]]:
    """The ways to give a conversation to a template; the content beside calls is never None."""
    empty = {"description": "", "parameters": {"type": "object", "properties": {}}}
    given = body.get("tools")
    completed = given and [
        tool
        | {"function": tool["function"] | {k: tool["function"].get(k, empty[k]) for k in empty}}
        for tool in given
    ]
    for thinks, as_text, toolset in product((True, False), (False, True), (given, completed)):
        messages = [dict(message) for message in body["messages"]]
        for message in messages:
            message["content"] = message["content"] or ""
            reasoning = message.pop("reasoning_content", None)
            if reasoning and thinks:
                message |= {"reasoning_content": reasoning, "reasoning": reasoning}
            for each in message.get("tool_calls", ()):
                assert isinstance(each["function"]["arguments"], str)
            if not as_text and "tool_calls" in message:
                message["tool_calls"] = [with_object(each) for each in message["tool_calls"]]
        yield messages, toolset


def with_object(each: Body) -> Body:
    arguments = json.loads(each["function"]["arguments"])
    return each | {"function": each["function"] | {"arguments": arguments}}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_conversation_is_rendered_as_by_transformers(shape: str) -> None:
    template = SHAPES[shape] + "{# tools #}"
    text = text_of(template)
    for name, body in CONVERSATIONS.items():
        expected, got = oracle(template, body), rendered(text, body)
        assert got == expected or expected is None, name


@pytest.mark.parametrize("shape", SHAPES)
def test_a_message_is_continued_as_by_transformers(shape: str) -> None:
    text = text_of(SHAPES[shape])
    for content in CONTINUED:
        messages = [USER, ANSWER | {"content": content}]
        expected = oracle(SHAPES[shape], {"messages": messages, "continue_final_message": True})
        got = rendered(text, {"messages": messages, "continue_final_message": True})
        assert got == expected or expected is None, content


def test_every_conversation_of_calls_is_rendered_by_most_shapes() -> None:
    """So that the comparison is not one of refusals."""
    texts = [text_of(template + "{# tools #}") for template in SHAPES.values()]
    for name, body in CONVERSATIONS.items():
        num_rendered = sum(rendered(text, body) is not None for text in texts)
        assert num_rendered >= len(SHAPES) - 2, name


def test_calls_that_a_template_refuses_together_are_rendered_one_by_one() -> None:
    """transformers refuses them; but a model may write them, and they are its history then."""
    messages = CONVERSATIONS["two calls"]["messages"]
    given = {"messages": [*messages, ANSWER, USER], "tools": tools()}
    apart = [USER, calls(), result(), calls(call('{"city": "Rome"}', 2)), result(2), ANSWER, USER]
    template = SHAPES["one call at most"] + "{# tools #}"
    assert oracle(template, given) is None
    assert rendered(text_of(template), given) == oracle(template, given | {"messages": apart})


@pytest.mark.parametrize("given", ["x", 5, {"a": 1}, ["x"], [{"function": "f"}], [None]])
def test_variables_of_a_client_that_are_no_tools_are_its_own_error(given: object) -> None:
    body = {"messages": [USER], "chat_template_kwargs": {"tools": given}}
    for template in SHAPES.values():
        rendered(text_of(template + "{# tools #}"), body)


def test_messages_that_do_not_alternate_are_joined_for_templates_that_want_it() -> None:
    """An agent adds text to the results of its tools."""
    said = {"role": "assistant", "content": "I look."}
    given = [USER, said, calls(), result(), USER, ANSWER, USER, USER]
    joined = [
        USER,
        calls(content="I look."),
        result(content=f"18\n\n{USER['content']}"),
        ANSWER,
        USER | {"content": "Weather?\n\nWeather?"},
    ]
    template = SHAPES["alternating but for calls"] + "{# tools #}"
    expected = oracle(template, {"messages": joined, "tools": tools()})
    assert oracle(template, {"messages": given, "tools": tools()}) is None
    assert rendered(text_of(template), {"messages": given, "tools": tools()}) == expected


def test_ids_that_a_template_refuses_are_rendered_as_short_ones() -> None:
    messages = CONVERSATIONS["steps"]["messages"]
    text = text_of(SHAPES["call ids of nine"] + "{# tools #}")
    prompt = rendered(text, {"messages": messages, "tools": tools()})
    other = json.loads(json.dumps(messages).replace("call_abc", "toolu_01ABCDEFGHIJ_"))
    changed = rendered(text, {"messages": other, "tools": tools()})
    assert prompt is not None and changed is not None
    found, ids = (re.findall(r'id": "(\w+)"', each) for each in (prompt, changed))
    assert found[:2] == ["call_abc1"] * 2 and {len(each) for each in ids} == {9}
    assert [found.index(each) for each in found] == [ids.index(each) for each in ids]


@pytest.mark.parametrize("arguments", ['{"cit', "null", " ", "[]", "Paris", "1", '"a"', "{]"])
def test_arguments_that_are_no_object_are_rendered_by_every_shape_of_calls(arguments: str) -> None:
    body = {"messages": [USER, calls(call(arguments)), result()], "tools": tools()}
    for name, template in SHAPES.items():
        text = text_of(template + "{# tools #}")
        prompt = rendered(text, body)
        if rendered(text, CONVERSATIONS["a call alone"]) is not None:
            assert prompt is not None and "None" not in prompt, name
