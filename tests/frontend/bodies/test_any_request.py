"""Requests of all kinds over HTTP: each gets an answer or an error of the caller, and soon."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvloop
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tandem.frontend.anthropic.requests import Conversing, MessagesRequest
from tandem.frontend.chat.requests import ChatRequest, CompletionRequest
from tandem.frontend.responses.requests import ResponsesRequest
from tandem.runtime.context import RequestContext
from tandem.runtime.plane.server import Responder
from tandem.runtime.wire.messages import GenerateRequest
from tests.frontend.chat.test_requests import VALUES
from tests.frontend.frontend_stack import ANSWER, MODEL, Stack, answer_with
from tests.frontend.generation.test_choices import scored

HANG_S = 60.0  # the machine may be busy; the longest time is printed
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"model": MODEL, "prompt": "Hi"},
    "/v1/responses": {"model": MODEL, "input": "Hi"},
    "/v1/messages": {
        "model": MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": "Hi"}]
    },
    "/v1/messages/count_tokens": {
        "model": MODEL, "messages": [{"role": "user", "content": "Hi"}]
    },
    "/tokenize": {"model": MODEL, "prompt": "Hi"},
    "/detokenize": {"model": MODEL, "tokens": [1]},
}  # fmt: skip
FIELDS: dict[str, list[str]] = {
    "/v1/chat/completions": list(ChatRequest.__struct_fields__),
    "/v1/completions": list(CompletionRequest.__struct_fields__),
    "/v1/responses": list(ResponsesRequest.__struct_fields__),
    "/v1/messages": list(MessagesRequest.__struct_fields__),
    "/v1/messages/count_tokens": list(Conversing.__struct_fields__),
    "/tokenize": ["prompt", "messages", "add_special_tokens", "return_token_strs", "tools"],
    "/detokenize": ["tokens", "prompt"],
}
SMALL = st.integers(-2, 20) | st.floats(-2, 2) | st.booleans()
TEXTS = st.text(max_size=20) | st.lists(st.text(max_size=5) | st.integers(0, 300), max_size=4)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "wizard"])
MESSAGE = st.fixed_dictionaries(
    {"role": ROLES, "content": TEXTS | VALUES}, optional={"name": VALUES, "tool_calls": VALUES}
)
MESSAGES = st.lists(MESSAGE, max_size=3)
KINDS = st.sampled_from(
    ["message", "function_call", "function_call_output", "reasoning", "item_reference", "text",
     "thinking", "tool_use", "tool_result", "image", "input_text", "function", "namespace",
     "web_search", "allowed_tools", "auto", "any", "tool", "json_schema", "enabled"]
)  # fmt: skip
NAMES = (
    "role", "content", "text", "name", "call_id", "arguments", "output", "summary", "thinking",
    "encrypted_content", "id", "input", "tool_use_id", "parameters", "input_schema", "tools",
    "format", "schema", "mode", "effort", "cache_control", "strict",
)  # fmt: skip
OBJECTS = st.recursive(
    st.fixed_dictionaries({"type": KINDS}, optional=dict.fromkeys(NAMES, TEXTS | ROLES | VALUES)),
    lambda inner: st.fixed_dictionaries(
        {"type": KINDS}, optional={name: st.lists(inner, max_size=3) | inner for name in NAMES}
    ),
    max_leaves=4,
)
SHAPES = OBJECTS | st.lists(OBJECTS | MESSAGE, max_size=3) | VALUES
PARTS = {
    "messages": MESSAGES | SHAPES,
    "prompt": TEXTS | st.lists(TEXTS, max_size=3),
} | dict.fromkeys(
    ("input", "system", "tools", "tool_choice", "text", "reasoning", "thinking"), SHAPES
)
PATHS = st.sampled_from(
    [*BASES, "/version", "/v1/responses/x", "/live", "/health", "/metrics", "/metrics/targets",
     "/v1/models",
     f"/v1/models/{MODEL}", "/v1/models//",
     f"/v1/models/{MODEL}/ready", "/v1/models/%00%ff/ready", "/v1/embeddings", "/"]
)  # fmt: skip
TOKENS = st.text("abcdefgh-", min_size=1, max_size=12)
KNOWN_HEADERS = (
    "accept", "authorization", "content-encoding", "content-type", "cookie", "origin", "range",
    "x-request-id", "x-tandem-prefill", "x-tandem-ttft-target-ms", "traceparent",
    "access-control-request-method",
)  # fmt: skip
CONTROLS = bytes([*range(32), 127])
HEADERS = st.dictionaries(
    st.sampled_from(KNOWN_HEADERS) | TOKENS.map("x-{}".format),
    st.binary(max_size=40).map(lambda value: value.translate(None, CONTROLS).strip()),
    max_size=4,
)
DONE = "data: [DONE]\n\n"
ENDS = {
    "/v1/chat/completions": DONE,
    "/v1/completions": DONE,
    "/v1/responses": DONE,
    "/v1/messages": 'data: {"type":"message_stop"}\n\n',
}
RESULTS = {
    "/v1/chat/completions": "choices", "/v1/completions": "choices", "/v1/responses": "output",
    "/v1/messages": "content", "/v1/messages/count_tokens": "input_tokens", "/tokenize": "tokens",
    "/detokenize": "prompt",
}  # fmt: skip
FEW = settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])


def fields_of(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """Return bodies with some fields of a request, right, nearly right or absurd."""
    kinds = {name: PARTS.get(name, SMALL | VALUES) for name in FIELDS[path]}
    return st.fixed_dictionaries({}, optional=kinds)


BODIES = st.sampled_from(sorted(BASES)).flatmap(
    lambda path: st.tuples(st.just(path), fields_of(path), st.sets(st.sampled_from(["model", "n"])))
)


class Surface:
    """A frontend for all examples of a test."""

    def __init__(self, runner: asyncio.Runner, stack: Stack) -> None:
        self._runner, self._stack = runner, stack
        self.longest_s = 0.0

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request; it must get an answer in time, and not fail inside of the frontend."""
        started_s = time.perf_counter()
        response = self._runner.run(self._stack.http.request(method, path, **options))
        took_s = time.perf_counter() - started_s
        self.longest_s = max(self.longest_s, took_s)
        assert took_s < HANG_S
        assert response.status_code < 500, response.text
        assert response.headers["x-request-id"]
        if response.status_code >= 400 and method != "HEAD":
            error = response.json()["error"]
            assert error["message"] and "\n" not in error["message"]
        return response


async def answer_or_score(
    request: GenerateRequest, context: RequestContext, responder: Responder
) -> None:
    script = scored if request.sampling.prompt_logprobs else answer_with(ANSWER)
    await script(request, context, responder)


@pytest.fixture(scope="module")
def surface() -> Iterator[Surface]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stack = Stack()
        runner.run(stack.__aenter__())
        stack.worker.script = answer_or_score
        surface = Surface(runner, stack)
        yield surface
        runner.run(stack.__aexit__())
        print(f"\nthe longest answer took {surface.longest_s:.3f} s")


@FEW
@example(("/v1/chat/completions", {"prompt_logprobs": 3}, set()))
@given(BODIES)
def test_any_body_gets_an_answer_or_an_error_of_the_caller(
    surface: Surface, case: tuple[str, dict[str, Any], set[str]]
) -> None:
    path, fields, kept = case
    body = fields | {name: value for name, value in BASES[path].items() if name in kept}
    response = surface.request("POST", path, content=json.dumps(BASES[path] | body))
    if response.status_code != 200:
        is_other = body.get("model", MODEL) != MODEL or body.get("previous_response_id") is not None
        assert response.status_code == 400 or (response.status_code == 404 and is_other)
    elif body.get("stream") is True:
        assert response.text.endswith(ENDS[path]) and '{"error"' not in response.text
    else:
        assert RESULTS[path] in response.json()


@FEW
@given(
    st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"]),
    PATHS,
    HEADERS,
    st.binary(max_size=100),
)
def test_any_head_gets_an_answer_or_an_error_of_the_caller(
    surface: Surface, method: str, path: str, headers: dict[str, bytes], content: bytes
) -> None:
    surface.request(method, path, headers=headers, content=content)
