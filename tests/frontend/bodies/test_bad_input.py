import asyncio
import json
import time
import tracemalloc

import httpx
import pytest

from tandem.frontend.chat.requests import ChatRequest, CompletionRequest, parse
from tandem.frontend.config import FrontendConfig
from tandem.runtime.errors import ContextLengthError, InvalidRequestError
from tests.frontend.frontend_stack import CONTEXT_LENGTH, MODEL, Stack

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": MODEL, "prompt": "Hi"}

TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ANSWER = {"role": "assistant", "content": "", "tool_calls": [CALL]}


BAD_CHATS: list[tuple[dict[str, object], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"text": "Hi"}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ({"messages": [ANSWER | {"role": "user"}]}, "messages[0].tool_calls"),
    ({"messages": [ANSWER | {"tool_call_id": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "tool_call_id": "x"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "", "reasoning": "x"}]}, "messages[0].reasoning"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL] * 4097}]}, "messages[0].tool_calls"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"stream": "true"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": True}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 5e-324}, "repetition_penalty"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"allowed_token_ids": [1] * 16385}, "allowed_token_ids"),
    ({"max_completion_tokens": 2**31}, "max_completion_tokens"),
    ({"min_p": 1.5}, "min_p"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
    ),
    ({"tools": [TOOL] * 257}, "tools"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 65536}}]},
        "tools[0]",
    ),
    ({"tools": [TOOL]}, "tools"),  # this model's chat template takes none
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_object"}}, "response_format"),  # no support of this worker
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[]"}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a"] * 1025}, "guided_choice"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"disable_fallback": True}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ({"functions": [{"name": ""}]}, "functions[0].name"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"chat_template": "x"}, "chat_template"),
    ({"model": None}, "model"),
    ({"messages": [{"role": "user", "content": "Hi"}] * 2049}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 4097}]},
        "messages[0].content",
    ),
    (
        {"messages": [{"role": "user", "content": "Hi", **dict.fromkeys(map(str, range(70)))}]},
        "messages[0]",
    ),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"metadata": {"a": "x" * 65536}}, "metadata"),
    ({"chat_template_kwargs": {"a": [[]] * 30_000}}, "chat_template_kwargs"),
]
BAD_COMPLETIONS: list[tuple[dict[str, object], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [99999]}, "prompt"),
    ({"prompt": ["a"] * 257}, "prompt"),
    ({"prompt": [1] * CONTEXT_LENGTH}, "prompt"),
    ({"prompt": [1] * (2**20 + 1)}, "prompt"),
    ({"prompt": [[1] * 2**20, [1]]}, "prompt"),
    ({"prompt": [[[1]]]}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"echo": True, "logprobs": 20, "n": 16, "prompt": [[1] * 100] * 16}, "logprobs"),
    ({"max_tokens": 0, "prompt": [1] * (CONTEXT_LENGTH + 1)}, "prompt"),
    ({"max_tokens": 0, "min_tokens": 1}, "min_tokens"),
]


def error_of(response: httpx.Response) -> dict[str, object]:
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    error: dict[str, object] = body["error"]
    return error


async def check(stack: Stack, path: str, body: dict[str, object], param: str) -> None:
    response = await stack.http.post(path, json=body)
    assert response.status_code == 400, (body, response.text)
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, (body, error)
    assert param.split("[")[0] in str(error["message"]) or "context" in str(error["message"])


async def test_each_bad_field_of_a_chat_is_a_400_that_names_it(stack: Stack) -> None:
    for fields, param in BAD_CHATS:
        await check(stack, "/v1/chat/completions", CHAT | fields, param)
    assert not stack.worker.requests


async def test_each_bad_field_of_a_completion_is_a_400_that_names_it(stack: Stack) -> None:
    for fields, param in BAD_COMPLETIONS:
        await check(stack, "/v1/completions", COMPLETION | fields, param)
    assert not stack.worker.requests


async def test_an_error_repeats_no_more_of_a_name_than_its_beginning(stack: Stack) -> None:
    for fields in ({"tool_choice": "x" * 60_000}, {"model": "x" * 60_000}):
        error = error_of(await stack.http.post("/v1/chat/completions", json=CHAT | fields))
        assert "xxx" in str(error["message"]) and len(json.dumps(error)) < 500


async def test_an_error_repeats_no_more_of_a_path_than_its_beginning(stack: Stack) -> None:
    error = error_of(await stack.http.get("/" + "x" * 10_000))
    assert "xxx" in str(error["message"]) and len(json.dumps(error)) < 500


async def test_a_missing_field_is_named(stack: Stack) -> None:
    for missing in ("model", "messages"):
        body = {key: value for key, value in CHAT.items() if key != missing}
        await check(stack, "/v1/chat/completions", body, missing)


async def test_a_body_that_is_no_json_object_is_a_400(stack: Stack) -> None:
    for raw in [b"", b"{", b"[]", b"nul", b'{"model": "\xff"}', b"5"]:
        response = await stack.http.post("/v1/chat/completions", content=raw)
        assert response.status_code == 400, raw
        assert "body" in str(error_of(response)["message"])


async def test_a_prompt_over_the_context_says_both_numbers(stack: Stack) -> None:
    response = await stack.complete(prompt=[1] * 200)
    error = error_of(response)
    assert response.status_code == 400 and error["code"] == "context_length_exceeded"
    assert "128" in str(error["message"]) and "200" in str(error["message"])


async def test_an_unknown_model_is_a_404(stack: Stack) -> None:
    response = await stack.chat(model="nobody/nothing")
    assert response.status_code == 404
    error = error_of(response)
    assert error["code"] == "model_not_found" and MODEL in str(error["message"])


async def test_unknown_paths_and_wrong_methods(stack: Stack) -> None:
    assert (await stack.http.get("/v2/chat")).status_code == 404
    assert error_of(await stack.http.get("/v2/chat"))["code"] == "not_found"
    for path in ("/v1/chat/completions", "/v1/completions"):
        response = await stack.http.get(path)
        assert response.status_code == 405 and response.headers["allow"] == "POST"
        error_of(response)
    response = await stack.http.post("/v1/models")
    assert response.status_code == 405
    error_of(response)


WRONG_HEADERS = [
    ("x-tandem-prefill", "moon"),
    ("x-tandem-ttft-target-ms", "soon"),
    ("x-tandem-ttft-target-ms", "nan"),
    ("x-tandem-itl-target-ms", "0"),
    ("x-tandem-itl-target-ms", "3600001"),
]


async def test_a_wrong_header_is_a_400(stack: Stack) -> None:
    for header, value in WRONG_HEADERS:
        response = await stack.http.post("/v1/chat/completions", json=CHAT, headers={header: value})
        assert response.status_code == 400 and error_of(response)["param"] == header


async def test_a_body_over_the_limit_is_a_413_with_and_without_its_length() -> None:
    async with Stack(config=FrontendConfig(port=0, max_body_bytes=2048)) as stack:
        body = json.dumps({**CHAT, "user": "x" * 4096}).encode()

        async def chunks() -> object:
            for start in range(0, len(body), 512):
                yield body[start : start + 512]

        for content in (body, chunks()):
            response = await stack.http.post("/v1/chat/completions", content=content)
            assert response.status_code == 413
            assert "2048" in str(error_of(response)["message"])
        assert (await stack.chat()).status_code == 200  # the connection is in order
        assert len(stack.worker.requests) == 1


async def test_a_body_that_does_not_come_is_a_408() -> None:
    async with Stack(config=FrontendConfig(port=0, body_timeout_s=0.1)) as stack:
        host, _, port = stack.server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: 5\r\n\r\n{"
        )
        answer = await reader.read()  # to the end of the connection
        assert b" 408 " in answer and b"connection: close" in answer
        writer.close()
        await writer.wait_closed()


NOT_JSON: list[tuple[dict[str, str], str]] = [
    ({"content-type": "text/plain"}, "text/plain"),
    ({"content-type": "application/x-www-form-urlencoded"}, "urlencoded"),
    ({"content-encoding": "gzip"}, "gzip"),
]


async def test_a_body_that_is_not_json_by_its_headers_is_a_415(stack: Stack) -> None:
    raw = json.dumps(CHAT).encode()
    for headers, named in NOT_JSON:
        response = await stack.http.post("/v1/chat/completions", content=raw, headers=headers)
        assert response.status_code == 415 and named in str(error_of(response)["message"])
        assert error_of(response)["code"] == "unsupported_media_type"
    assert not stack.worker.requests


async def test_a_charset_does_not_matter(stack: Stack) -> None:
    raw = json.dumps(CHAT).encode()
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    response = await stack.http.post("/v1/chat/completions", content=raw, headers=headers)
    assert response.status_code == 200


async def test_a_huge_list_of_wrong_values_does_not_hold_up_the_loop(stack: Stack) -> None:
    for values, param in (
        (b'"messages":[%b{}]' % (b"{}," * 1_000_000), "messages"),
        (b'"messages":[%b1]' % (b"1," * 1_000_000), "messages[0]"),
        (
            b'"messages":[{"role":"user","content":[%b1]}]' % (b"1," * 4000),
            "messages[0].content[0]",
        ),
    ):
        body = b'{"model":"test/model",%b}' % values
        began_s = time.process_time()
        response = await stack.http.post("/v1/chat/completions", content=body)
        assert response.status_code == 400 and error_of(response)["param"] == param
        assert (
            time.process_time() - began_s < 5
        )  # milliseconds; several seconds without failing fast


def nested(unit: str) -> str:
    """A value of 4 MiB with as many values in it as possible."""
    return "[" + ",".join([unit] * (4 * 2**20 // (len(unit) + 1))) + "]"


USER = '"role":"user","content":'


@pytest.mark.parametrize(
    "fields",
    [
        f'"messages":{nested(f"{{{USER}0}}")}',
        f'"messages":[{{{USER}{nested("{}")}}}]',
        f'"messages":[{{{USER}"","tool_calls":{nested("[]")}}}]',
        f'"messages":[{{{USER}""}}],"unknown":{nested("[]")}',
        f'"messages":[{{{USER}""}}],"chat_template_kwargs":{{"a":{nested("[]")}}}',
        f'"prompt":{nested("[1]")}',
        f'"prompt":[[{nested("[]")}]]',
    ],
    ids=["messages", "parts", "tool_calls", "unknown", "kwargs", "prompts", "nests"],
)
def test_a_body_of_many_values_is_refused_before_objects_are_made_of_them(fields: str) -> None:
    """Measured by the memory of the objects, because time depends on the machine."""
    kind = CompletionRequest if "prompt" in fields else ChatRequest
    raw = f'{{"model":"m",{fields}}}'.encode()
    tracemalloc.start()
    with pytest.raises(InvalidRequestError):
        parse(kind, raw, FrontendConfig())
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 96 * 2**20


@pytest.mark.parametrize("prompt", ["[{}]", "[[1],[{}]]"])
def test_more_tokens_than_the_longest_context_are_refused_before_the_body_is_checked(
    prompt: str,
) -> None:
    tokens = ",".join(["1"] * 4001)
    raw = f'{{"model":0,"prompt":{prompt.format(tokens)}}}'.encode()  # the model is wrong too
    with pytest.raises(ContextLengthError, match="has 4001 tokens, the most is 4000") as caught:
        parse(CompletionRequest, raw, FrontendConfig(), 4000)
    assert caught.value.param == "prompt"


async def test_a_number_that_json_does_not_have_is_named(stack: Stack) -> None:
    for value in ["NaN", "Infinity", "-Infinity"]:
        raw = f'{{"model":"{MODEL}","prompt":"Hi","temperature": {value}}}'
        response = await stack.http.post("/v1/completions", content=raw)
        assert response.status_code == 400
        error = error_of(response)
        assert error["param"] == "temperature" and value.strip("-") in str(error["message"])


async def test_a_byte_order_mark_is_named(stack: Stack) -> None:
    raw = b"\xef\xbb\xbf" + json.dumps(COMPLETION).encode()
    response = await stack.http.post("/v1/completions", content=raw)
    assert response.status_code == 400 and "byte order mark" in str(error_of(response)["message"])


async def test_a_nest_without_end_is_a_400(stack: Stack) -> None:
    for raw in (b"[" * 2**20, b'{"a":' * 2**20):
        response = await stack.http.post("/v1/completions", content=raw)
        assert response.status_code == 400 and "body" in str(error_of(response)["message"])


async def test_harmless_fields_of_official_clients_are_accepted(stack: Stack) -> None:
    response = await stack.chat(
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        tools=[],
        tool_choice="none",
        functions=None,
        response_format={"type": "text"},
        modalities=["text"],
        stop=None,
        stream=None,
        logit_bias=None,
        temperature=0,
    )
    assert response.status_code == 200, response.text
