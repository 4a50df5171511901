"""Each field that a client of these APIs is known to send, alone in a request."""

from typing import Any

import httpx
import pytest

from tandem.frontend.bodies.typed import Body
from tandem.frontend.chat.sampling import SamplingFields
from tandem.frontend.config import FrontendConfig
from tests.frontend.frontend_stack import (
    MODEL,
    Stack,
    byte_level_tokenizer,
    prompt_of,
)
from tests.frontend.grammar_worker import GrammarWorker, join

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"max_tokens": 32, "messages": [{"role": "user", "content": "Hi"}]},
}
PARAMETERS = {"type": "object", "properties": {"p": {"type": "string", "format": "path"}}}
FUNCTION = {"name": "f", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
SCHEMA = {"type": "object", "properties": {"s": {"type": "array", "uniqueItems": True}}}
URL = "data:image/png;base64,iVBORw0KGgo="
NOTES = {"cache_control": {"type": "ephemeral"}, "opts": {"a": 1}, "metadata": {"b": "c"}}


def says(role: str, content: object, **notes: object) -> dict[str, Any]:
    return {"role": role, "content": content, **notes}


def called(**fields: object) -> dict[str, Any]:
    """A conversation with a call of these fields, and its result."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, **fields}
    return {
        "messages": [
            says("user", "Hi"),
            says("assistant", None, tool_calls=[call]),
            says("tool", "ok", tool_call_id="c"),
        ]
    }


# The names in the header follow the fields.
CHAT: list[tuple[dict[str, Any], str]] = [
    ({"user": "u"}, ""), ({"metadata": {"a": "b"}}, ""), ({"store": True}, ""),
    ({"service_tier": "flex"}, ""), ({"service_tier": "priority"}, ""),
    ({"safety_identifier": "s"}, ""), ({"prompt_cache_key": "k"}, ""),
    ({"prompt_cache_retention": "24h"}, ""), ({"verbosity": "low"}, ""),
    ({"prediction": {"type": "content", "content": "x"}}, ""), ({"priority": 5}, ""),
    ({"length_penalty": 2.0}, ""), ({"guided_decoding_backend": "outlines"}, ""),
    ({"spaces_between_special_tokens": False}, ""), ({"modalities": ["text"]}, ""),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs"), ({"request_id": "r"}, "request_id"),
    ({"mm_processor_kwargs": {}}, "mm_processor_kwargs"),
    ({"web_search_options": {}}, "web_search_options"), ({"plugins": []}, "plugins"),
    ({"provider": {"order": ["x"]}}, "provider"), ({"transforms": []}, "transforms"),
    ({"models": ["a"]}, "models"), ({"route": "fallback"}, "route"),
    ({"keep_alive": "5m"}, "keep_alive"), ({"options": {"num_ctx": 1}}, "options"),
    ({"think": True}, "think"), ({"cache_prompt": True}, "cache_prompt"),
    ({"thinking_budget": 100}, "thinking_budget"), ({"something_new": 1}, "something_new"),
    ({"enable_thinking": True}, ""), ({"enable_thinking": False}, ""), ({"thinking": True}, ""),
    ({"thinking": {"type": "enabled", "budget_tokens": 9}}, ""),
    ({"thinking": {"type": "disabled"}}, ""), ({"reasoning": {"effort": "high"}}, ""),
    ({"reasoning": {"enabled": True}}, ""), ({"reasoning": {"max_tokens": 100}}, ""),
    ({"reasoning": {"exclude": True}}, ""), ({"include_reasoning": True}, ""),
    ({"include_reasoning": False}, ""), ({"separate_reasoning": True}, ""),
    ({"separate_reasoning": False}, "separate_reasoning"),
    ({"chat_template_kwargs": {"enable_thinking": True}}, ""), ({"reasoning_effort": "low"}, ""),
    ({"reasoning_effort": "none"}, ""), ({"max_tokens": 32000}, ""),
    ({"max_completion_tokens": 10**6}, ""), ({"tools": []}, ""), ({"tools": [TOOL]}, ""),
    ({"tools": [TOOL | NOTES]}, ""), ({"tools": [{"type": None, "function": FUNCTION}]}, ""),
    ({"tools": [{**TOOL, "function": FUNCTION | {"strict": None, "description": None}}]}, ""),
    ({"tools": [{**TOOL, "function": FUNCTION | {"strict": True}}]}, ""),
    ({"tools": [TOOL], "tool_choice": "required"}, ""),
    ({"tools": [{"type": "web_search"}, TOOL]}, "tools[0].type 'web_search'"),
    ({"tools": [{"type": "custom", "custom": {"name": "c"}}]}, "tools[0].type 'custom'"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"},
     "tools[0].type 'web_search', tool_choice"),
    ({"tools": [TOOL], "tool_choice": {
        "type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}}, ""),
    ({"tool_choice": "auto", "parallel_tool_calls": True}, ""),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": PARAMETERS}}}, ""),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "name": "s"}}},
     "response_format.json_schema.schema.properties.s.uniqueItems"),
    ({"guided_json": SCHEMA}, "guided_json.properties.s.uniqueItems"),
    ({"structured_outputs": {"json": PARAMETERS, "disable_any_whitespace": True}}, ""),
    ({"stream": True, "stream_options": {"include_usage": True, "chunk_size": 1}}, ""),
    ({"messages": [says("user", "Hi", **NOTES, id="1", sender="x")]}, ""),
    ({"messages": [says("user", [{"type": "text", "text": "Hi", **NOTES}])]}, ""),
    ({"messages": [says("user", "Hi"), says("assistant", "x", audio=None, annotations=[{}],
        reasoning_details=[{}], thinking_blocks=[{}], provider_specific_fields={"a": 1})]}, ""),
    (called(), ""), (called(type=None, index=0, custom=None, **NOTES), ""),
    ({"messages": [says("user", [{"type": "image_url", "image_url": {"url": URL}}]),
        says("assistant", "A cat."), says("user", "Sure?")]}, "messages[0].content[0]"),
    ({"messages": [*called()["messages"][:2],
        says("tool", [{"type": "image_url", "image_url": {"url": URL}}], tool_call_id="c")]},
     "messages[2].content[0]"),
    ({"bad_words": ["no", "never again"]}, ""), ({"logprobs": True, "top_logprobs": 0}, ""),
    ({"allowed_token_ids": [1, 2], "stop": []}, ""),
    ({"functions": None, "function_call": None}, ""),
]  # fmt: skip
RESPONSE_TOOL = {"type": "function", "name": "f", "parameters": PARAMETERS}
RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, ""), ({"service_tier": "flex"}, ""), ({"truncation": "auto"}, ""),
    ({"prompt_cache_retention": "24h"}, ""), ({"prompt_cache_key": "k"}, ""),
    ({"safety_identifier": "s"}, ""), ({"client_metadata": {"a": {"b": 1}}}, ""),
    ({"text": {"verbosity": "low", "new": 1}}, ""), ({"max_tool_calls": 3}, ""),
    ({"top_logprobs": 3}, "top_logprobs"), ({"background": False}, ""),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, ""),
    ({"include": ["file_search_call.results"]}, "include[0] 'file_search_call.results'"),
    ({"include": ["reasoning.encrypted_content"]}, ""),
    ({"reasoning": {"effort": "low", "summary": "auto", "new": 1}}, ""),
    ({"reasoning": {"enabled": False}}, ""), ({"enable_thinking": True}, ""),
    ({"thinking": {"type": "enabled"}}, ""), ({"include_reasoning": False}, ""),
    ({"chat_template_kwargs": {"thinking": True}}, ""), ({"max_output_tokens": 32000}, ""),
    ({"tools": [{"type": "web_search", "filters": {}}]}, "tools[0].type 'web_search'"),
    ({"tools": [{"type": "file_search", "vector_store_ids": ["v"]}, RESPONSE_TOOL]},
     "tools[0].type 'file_search'"),
    ({"tools": [{"type": "code_interpreter"}, {"type": "mcp"}, {"type": "image_generation"},
        {"type": "local_shell"}, {"type": "shell"}, {"type": "apply_patch"},
        {"type": "tool_search"}, {"type": "computer_use_preview"}]},
     "tools[0].type 'code_interpreter', tools[1].type 'mcp', tools[2].type 'image_generation', "
     "tools[3].type 'local_shell', tools[4].type 'shell', tools[5].type 'apply_patch', "
     "tools[6].type 'tool_search', tools[7].type 'computer_use_preview'"),
    ({"tools": [{"type": "custom", "name": "c", "format": {"type": "text"}}]}, ""),
    ({"tools": [RESPONSE_TOOL | NOTES]}, ""), ({"tools": [RESPONSE_TOOL | {"strict": True}]}, ""),
    ({"tools": [RESPONSE_TOOL], "tool_choice": "required"}, ""),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
     "tools[0].type 'web_search', tool_choice.type 'web_search'"),
    ({"tools": [RESPONSE_TOOL], "tool_choice": {
        "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}},
     ""),
    ({"text": {"format": {"type": "json_schema", "name": "s", "schema": PARAMETERS,
        "strict": True}}}, ""),
    ({"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
     "text.format.schema.properties.s.uniqueItems"),
    ({"input": [says("user", "Hi", **NOTES)]}, ""),
    ({"input": [says("user", "Hi"), {"type": "web_search_call", "id": "ws", "status": "completed"},
        says("user", "And?")]}, "input[1].type 'web_search_call'"),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "c", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "y"}]}, ""),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c",
         "output": [{"type": "input_image", "image_url": URL}]}]}, "input[1].output[0]"),
    ({"input": [says("user", "Hi"), {"type": "reasoning", "summary": [],
        "encrypted_content": "gAAAAA-_"}, says("user", "x")]}, "input[1].encrypted_content"),
    ({"something_new": 1}, "something_new"),
]  # fmt: skip
CLIENT_TOOL = {"name": "f", "input_schema": PARAMETERS}


def result(*blocks: object) -> dict[str, Any]:
    """A conversation whose last message is the result of a call."""
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    return {
        "messages": [
            says("user", "Hi"),
            says("assistant", [use]),
            says("user", [{"type": "tool_result", "tool_use_id": "c", "content": [*blocks]}]),
        ]
    }


def past(*blocks: object) -> dict[str, Any]:
    """A conversation with an answer of these blocks."""
    return {
        "messages": [
            says("user", "Hi"),
            says("assistant", [{"type": "text", "text": "Well."}, *blocks]),
            says("user", "And?"),
        ]
    }


PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 32000}, ""), ({"metadata": {"user_id": "u"}}, ""), ({"speed": "fast"}, ""),
    ({"service_tier": "auto"}, ""), ({"cache_control": {"type": "ephemeral"}}, ""),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ""),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, ""), ({"temperature": 1.5}, ""),
    ({"top_k": -1}, ""), ({"enable_thinking": True}, ""), ({"include_reasoning": False}, ""),
    ({"output_config": {"effort": "low", "task_budget": {"total": 1}}}, ""),
    ({"output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}}}, ""),
    ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, ""),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
     "context_management.edits[0].type 'clear_tool_uses_20250919'"),
    ({"mcp_servers": [{"url": "https://a.example"}]}, "mcp_servers"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
     "tools[0].type 'web_search_20250305'"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}, CLIENT_TOOL,
        {"type": "text_editor_20250728", "name": "e"}, {"type": "memory_20250818", "name": "m"}]},
     "tools[0].type 'bash_20250124', tools[2].type 'text_editor_20250728', "
     "tools[3].type 'memory_20250818'"),
    ({"tools": [CLIENT_TOOL | NOTES | {"defer_loading": True, "strict": True}]}, ""),
    ({"tools": [CLIENT_TOOL], "tool_choice": {"type": "any"}}, ""),
    (result(PNG), "messages[2].content[0].content[0]"),
    (result({"type": "document", "source": {}}), "messages[2].content[0].content[0]"),
    ({"messages": [says("user", [PNG]), says("assistant", "A cat."), says("user", "Sure?")]},
     "messages[0].content[0]"),
    (past({"type": "redacted_thinking", "data": "x"}),
     "messages[1].content[1].type 'redacted_thinking'"),
    (past({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}),
     "messages[1].content[1].type 'server_tool_use'"),
    (past({"type": "web_search_tool_result", "tool_use_id": "s", "content": []}),
     "messages[1].content[1].type 'web_search_tool_result'"),
    ({"messages": [says("user", [{"type": "text", "text": "Hi", "citations": None, **NOTES}])]},
     ""),
    ({"something_new": 1}, "something_new"),
]  # fmt: skip
FIELDS = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES}
CASES = [(path, *case) for path, cases in FIELDS.items() for case in cases]


WORKER = GrammarWorker


async def post(stack: Stack, path: str, fields: dict[str, Any]) -> httpx.Response:
    return await stack.http.post(path, json={"model": MODEL} | BODIES[path] | fields)


async def test_a_field_of_a_known_client_is_answered_and_named_if_it_is_left_out(
    stack: Stack,
) -> None:
    for path, fields, ignored in CASES:
        response = await post(stack, path, fields)
        assert response.status_code == 200, (path, fields, response.text)
        assert response.headers.get("x-tandem-ignored", "") == ignored, (path, fields)


async def test_a_field_that_is_left_out_is_refused_where_the_configuration_says_so() -> None:
    config = FrontendConfig(port=0, unknown_fields="refuse")
    async with Stack(num_workers=0, config=config) as stack:
        await join(stack, GrammarWorker)
        for path, fields, ignored in CASES:
            response = await post(stack, path, fields)
            is_seen = "image" in str(fields) or "document" in str(fields)
            is_refused = bool(ignored) and (not is_seen or "image_generation" in str(fields))
            assert response.status_code == (400 if is_refused else 200), (path, fields)
            if is_refused:
                first = ignored.partition(",")[0].partition(" ")[0]
                assert f"`{first}`" in response.json()["error"]["message"]


SAMPLING: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.25, "presence_penalty": 0.5, "frequency_penalty": -0.5,
    "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5, "seed": 3, "allowed_token_ids": [5, 6],
    "bad_words": ["x"], "cache_salt": "a",
}  # fmt: skip


async def test_a_field_of_one_api_is_taken_by_the_others_alike(stack: Stack) -> None:
    typed = {"metadata": {"a": "b"}, "store": True, "truncation": "auto", "max_tool_calls": 2}
    for path in FIELDS:
        for name in Body.no_effect:
            response = await post(stack, path, {name: typed.get(name, "x")})
            assert response.status_code == 200, (path, name, response.text)
            assert "x-tandem-ignored" not in response.headers, (path, name)
        for name in Body.refused:
            response = await post(stack, path, {name: "x"})
            assert response.status_code == 400, (path, name)
            assert f"`{name}` is not supported" in response.text, (path, name)
        for name in Body.switches:
            assert (await post(stack, path, {name: True})).status_code == 400, (path, name)
            response = await post(stack, path, {name: False})
            assert response.status_code == 200, (path, name)
            assert "x-tandem-ignored" not in response.headers, (path, name)


async def test_the_fields_of_sampling_are_those_of_every_api(stack: Stack) -> None:
    assert SAMPLING.keys() == set(SamplingFields.__struct_fields__)
    sampled = []
    for path in FIELDS:
        response = await post(stack, path, SAMPLING)
        assert response.status_code == 200, (path, response.text)
        assert "x-tandem-ignored" not in response.headers, path
        sampled.append(stack.worker.requests[-1])
    one, *others = sampled
    assert one.sampling.top_k == 7 and one.sampling.allowed_token_ids == [5, 6]
    assert all(each.sampling == one.sampling for each in others)
    assert {each.cache_salt for each in sampled} == {one.cache_salt} != {""}


THINKING = [
    ({"enable_thinking": True}, True), ({"enable_thinking": False}, False),
    ({"thinking": True}, True), ({"thinking": {"type": "enabled"}}, True),
    ({"thinking": {"type": "disabled"}, "enable_thinking": None}, False),
    ({"reasoning": {"enabled": True}}, True), ({"reasoning": {"effort": "high"}}, True),
    ({"reasoning": {"effort": "none"}}, False), ({"reasoning": {"max_tokens": 9}}, True),
    ({"chat_template_kwargs": {"enable_thinking": True}}, True),
]  # fmt: skip


async def test_the_switches_of_reasoning_reach_the_template_from_every_api(stack: Stack) -> None:
    for fields, thinks in THINKING:
        for path in FIELDS:
            assert (await post(stack, path, fields)).status_code == 200, (path, fields)
            prompt = prompt_of(stack.worker.requests[-1])
            assert prompt.endswith("<think>\n") == thinks, (path, fields)


async def test_a_limit_beyond_the_context_is_cut_to_it_or_refused() -> None:
    limits = ("max_tokens", "max_output_tokens", "max_tokens")
    for clamps in (True, False):
        config = FrontendConfig(port=0, clamp_max_tokens=clamps)
        async with Stack(num_workers=0, config=config) as stack:
            await join(stack, GrammarWorker)
            for path, limit in zip(BODIES, limits, strict=True):
                response = await post(stack, path, {limit: 32000})
                is_cut = clamps or path == "/v1/messages"
                assert response.status_code == (200 if is_cut else 400), response.text
            [*_, last] = stack.worker.requests
            num_prompt = len(last.token_ids) // 4
            assert last.stop.max_tokens == GrammarWorker.length - num_prompt


async def test_a_new_image_is_refused_and_every_other_one_where_it_is_to_be(stack: Stack) -> None:
    parts: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [
            says("user", [{"type": "image_url", "image_url": {"url": URL}}])]},
        "/v1/responses": {"input": [says("user", [{"type": "input_image", "image_url": URL}])]},
        "/v1/messages": {"messages": [says("user", [PNG])]},
    }  # fmt: skip
    for path, fields in parts.items():
        response = await post(stack, path, fields)
        assert response.status_code == 400 and "[0].content[0].type`" in response.text
    async with Stack(num_workers=0, config=FrontendConfig(port=0, images_as_text=False)) as strict:
        await join(strict, GrammarWorker)
        for fields in (result(PNG), past(PNG) | {"messages": [says("user", [PNG]),
                       says("assistant", "x"), says("user", "y")]}):  # fmt: skip
            assert (await post(strict, "/v1/messages", fields)).status_code == 400


async def test_the_log_names_what_is_left_out_as_the_header_does(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tandem.frontend.telemetry.request_log")
    response = await post(stack, "/v1/responses", {"something_new": 1, "top_logprobs": 2})
    ignored = response.headers["x-tandem-ignored"]
    assert ignored == "something_new, top_logprobs"
    assert f", ignored: {ignored}" in caplog.text


async def test_the_header_of_what_is_left_out_is_bounded(stack: Stack) -> None:
    fields = {f"field {i} \n é {'x' * 200}": 1 for i in range(40)}
    response = await post(stack, "/v1/chat/completions", fields)
    value = response.headers["x-tandem-ignored"]
    assert response.status_code == 200 and value.endswith(", and 24 more") and len(value) < 2048


async def test_bad_words_are_tokens_to_the_worker_with_a_space_before_and_without(
    stack: Stack,
) -> None:
    fields = {"bad_words": ["no", " so"], "allowed_token_ids": [3, 4]}
    assert (await post(stack, "/v1/chat/completions", fields)).status_code == 200
    sampling = stack.worker.requests[-1].sampling
    assert sampling.allowed_token_ids == [3, 4]
    words = {byte_level_tokenizer().decode(each) for each in sampling.bad_words}
    assert words == {"no", " no", " so"}
    response = await post(stack, "/v1/chat/completions", {"allowed_token_ids": [999_999]})
    assert response.status_code == 400 and "`allowed_token_ids`" in response.text
