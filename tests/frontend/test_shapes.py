"""One conversation in the shapes of three APIs: the model is given the same prompt."""

from typing import Any

import pytest

from tests.frontend.frontend_stack import (
    MODEL,
    FakeWorker,
    Stack,
    byte_level_tokenizer,
    model_files,
    prompt_tokens,
)

TEMPLATE = (
    "{{ tools | tojson }};{{ enable_thinking }};"
    "{% for m in messages %}{{ m.role }}|{{ m.content }}|{{ m.reasoning_content }}|"
    "{{ (m.tool_calls or []) | map(attribute='function') | list | tojson }}|"
    "{{ m.tool_call_id }};{% endfor %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}
CALL = {"name": "weather", "arguments": '{"city": "Oslo"}'}

CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "Oslo, then.",
         "tool_calls": [{"id": "c1", "type": "function", "function": CALL}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "user", "content": "And now?"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "reasoning_effort": "none",
}  # fmt: skip
RESPONSES: dict[str, Any] = {
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Oslo, then."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", **CALL},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"role": "user", "content": "And now?"},
    ],
    "tools": [{"type": "function", **FUNCTION}],
    "reasoning": {"effort": "none"},
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "max_tokens": 20,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Oslo, then.", "signature": "x"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1",
             "content": [{"type": "text", "text": "sunny"}]},
            {"type": "text", "text": "And now?"},
        ]},
    ],
    "tools": [{"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}],
    "thinking": {"type": "disabled"},
}  # fmt: skip
SHAPES = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}


async def test_one_conversation_has_one_prompt_in_every_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.frontend.frontend_stack.CONTEXT_LENGTH", 4096)
    async with Stack(num_workers=0) as stack:
        worker = FakeWorker(stack.store, stack.listeners, files=model_files(TEMPLATE))
        await stack.join(worker)
        await stack.wait_until(lambda: bool(stack.server.catalog.models))
        for path, fields in SHAPES.items():
            response = await stack.http.post(path, json={"model": MODEL} | fields)
            assert response.status_code == 200, response.text
        prompts = [
            byte_level_tokenizer().decode(prompt_tokens(request), skip_special_tokens=False)
            for request in worker.requests
        ]
        assert prompts[0] == prompts[1] == prompts[2]
        assert "Oslo, then." in prompts[0] and '"city": "Oslo"' in prompts[0]
        counted = await stack.http.post(
            "/v1/messages/count_tokens",
            json={"model": MODEL} | {k: v for k, v in MESSAGES.items() if k != "max_tokens"},
        )
        assert counted.json()["input_tokens"] == len(prompt_tokens(worker.requests[-1]))
