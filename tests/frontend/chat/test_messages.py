"""Tools and reasoning of a conversation, as its chat template gets them."""

import json

from tandem.frontend.chat.requests import ChatRequest, parse
from tandem.frontend.config import FrontendConfig

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TURNS = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "2"}]},
]


def chat(**fields: object) -> ChatRequest:
    body = {"model": "m", "messages": TURNS} | fields
    return parse(ChatRequest, json.dumps(body).encode(), FrontendConfig())


def test_a_call_and_its_result_reach_the_template_as_the_client_has_them() -> None:
    system, user, answer, result = chat().conversation()
    assert system == {"role": "system", "content": "Be brief."}
    assert user == {"role": "user", "content": "Hi"}
    function = {"name": "f", "arguments": '{"a": 1}'}
    assert answer == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "thinking": "hm",
        "reasoning": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "2"}


def test_tools_are_a_variable_of_the_template_unless_none_may_be_called() -> None:
    assert chat(tools=[TOOL]).template_variables() == {"tools": [TOOL]}
    assert chat(tools=[TOOL], tool_choice="none").template_variables() == {}
    assert chat().template_variables() == {}


def test_documents_are_a_variable_of_the_template() -> None:
    documents = [{"title": "One", "text": "Two"}]
    assert chat(documents=documents).template_variables() == {"documents": documents}


def test_the_effort_of_reasoning_reaches_the_template_under_the_names_that_templates_have() -> None:
    assert chat(reasoning_effort="low").template_variables() == {
        "enable_thinking": True,
        "thinking": True,
        "reasoning_effort": "low",
    }
    off = chat(reasoning_effort="none", chat_template_kwargs={"thinking": True, "x": 1})
    assert off.template_variables() == {"enable_thinking": False, "thinking": True, "x": 1}


def test_nothing_that_a_model_may_write_in_a_call_is_refused() -> None:
    for name, arguments in [("", ""), ("x" * 300, None), ("a b\n", '{"a'), ("f", "[" * 100_000)]:
        function = {"name": name, "arguments": arguments, "description": None}
        call = {"id": "x" * 400, "function": function, "custom": None, "index": 0}
        [answer] = chat(messages=[{"role": "assistant", "tool_calls": [call]}]).conversation()
        assert answer["tool_calls"][0]["function"]["arguments"] == (arguments or "")
