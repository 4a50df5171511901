"""Sessions of coding agents, in the shapes that these send: each goes on to its last turn."""

import copy
import json
from typing import Any

import httpx

from tests.frontend.frontend_stack import MODEL, Stack, answer_with, prompt_of
from tests.frontend.grammar_worker import GrammarWorker

DATA = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNg"
SEEN = "[image: not shown, this model reads text only]"
CACHED = {"cache_control": {"type": "ephemeral"}}
CONTEXT = "<environment_context>\n  <cwd>/home/dev/shop</cwd>\n</environment_context>"


class RoomyWorker(GrammarWorker):
    """A worker whose model's context an agent fills to less than it asks for."""

    length = 16384


WORKER = RoomyWorker


def schema(**properties: object) -> dict[str, Any]:
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


PATH = {"type": "string", "format": "path", "description": "An absolute path"}
CODEX: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You are a coding agent in a terminal.",
    "tools": [
        {"type": "function", "name": "exec_command", "description": "Runs a command.",
         "strict": False, "parameters": schema(cmd={"type": "string"})},
        {"type": "custom", "name": "apply_patch", "description": "Edits files.",
         "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}},
        {"type": "web_search", "external_web_access": False},
        {"type": "function", "name": "view_image", "description": "Shows an image.",
         "strict": False, "parameters": schema(path=PATH)},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "service_tier": "priority",
    "prompt_cache_key": "0199-session",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "0199"},
}  # fmt: skip
CODEX_INPUT: list[dict[str, Any]] = [
    {"type": "message", "role": "developer",
     "content": [{"type": "input_text", "text": "Sandbox: workspace-write."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": CONTEXT}]},
    {"type": "message", "role": "user",
     "content": [{"type": "input_text", "text": "What does logo.png show?"}]},
]  # fmt: skip


def called(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def codex(stack: Stack, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of the next answer of a Codex session."""
    response = await stack.http.post("/v1/responses", json=CODEX | {"input": items})
    *_, last = events(response)
    assert last["type"] == "response.completed", last
    assert "tools[2].type 'web_search'" in response.headers["x-tandem-ignored"]
    output: list[dict[str, Any]] = last["response"]["output"]
    return output


async def test_codex_goes_on_after_its_image_and_its_patch(stack: Stack) -> None:
    items = copy.deepcopy(CODEX_INPUT)
    stack.worker.script = answer_with(
        f"I look.</think>{called('view_image', {'path': '/home/dev/shop/logo.png'})}"
    )
    thought, call = await codex(stack, items)
    assert (call["type"], call["name"]) == ("function_call", "view_image")
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{DATA}"}
    items += [thought, call]
    items.append({"type": "function_call_output", "call_id": call["call_id"], "output": [image]})
    patch = '*** Begin Patch\n*** Add File: a.txt\n+"hi"\n*** End Patch'
    stack.worker.script = answer_with(f"So.</think>{called('apply_patch', {'input': patch})}")
    thought, call = await codex(stack, items)
    assert SEEN in prompt_of(stack.worker.requests[-1])
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", patch)
    items += [thought, call]
    items.append({"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done"})
    stack.worker.script = answer_with("Good.</think>Done.")
    assert (await codex(stack, items))[-1]["content"][0]["text"] == "Done."
    prompt = prompt_of(stack.worker.requests[-1])
    assert '"name": "apply_patch", "arguments": {"input"' in prompt and "web_search" not in prompt


async def test_a_codex_session_of_another_server_goes_on(stack: Stack) -> None:
    items = [
        *CODEX_INPUT,
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAAB-x_y"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed",
         "action": {"type": "search", "query": "logo"}},
        {"type": "local_shell_call", "call_id": "l", "status": "completed",
         "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "l", "output": "logo.png"},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "A logo.", "annotations": []}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Sure?"}]},
    ]  # fmt: skip
    stack.worker.script = answer_with("Hm.</think>Yes.")
    assert (await codex(stack, items))[-1]["content"][0]["text"] == "Yes."
    prompt = prompt_of(stack.worker.requests[-1])
    assert "A logo." in prompt and "gAAAAAB" not in prompt and "ws_1" not in prompt


CLAUDE: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 32000,
    "stream": True,
    "temperature": 1,
    "metadata": {"user_id": "user_0_account__session_0"},
    "system": [
        {"type": "text", "text": "You are a coding agent.", **CACHED},
        {"type": "text", "text": "Working directory: /home/dev/shop", **CACHED},
    ],
    "tools": [
        {"name": "Read", "description": "Reads a file, also an image.",
         "input_schema": schema(file_path=PATH)},
        {"name": "WebSearch", "description": "Searches.",
         "input_schema": schema(query={"type": "string", "minLength": 2}), **CACHED},
    ],
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}  # fmt: skip


async def claude(stack: Stack, messages: list[Any], **fields: object) -> list[dict[str, Any]]:
    """Return the blocks of the next answer of a Claude Code session."""
    body = CLAUDE | {"messages": messages} | fields
    found = events(await stack.http.post("/v1/messages?beta=true", json=body))
    assert found[-1]["type"] == "message_stop", found[-1]
    blocks: list[dict[str, Any]] = []
    for event in found:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            for name, text in event["delta"].items():
                if name in ("text", "thinking"):
                    blocks[-1][name] += text
                elif name == "partial_json":
                    blocks[-1]["json"] += text
    for block in blocks:
        whole = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(whole)
    return blocks


async def test_claude_code_goes_on_after_it_has_read_an_image(stack: Stack) -> None:
    messages: list[Any] = [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
            {"type": "text", "text": "What does logo.png show?", **CACHED},
        ]},
    ]  # fmt: skip
    path = {"file_path": "/home/dev/shop/logo.png"}
    stack.worker.script = answer_with(f"I look.</think>{called('Read', path)}")
    blocks = await claude(stack, messages)
    use = blocks[-1]
    assert (use["name"], use["input"]) == ("Read", path)
    image = {"type": "image", "source": {
        "type": "base64", "media_type": "image/png", "data": DATA}}  # fmt: skip
    messages.append({"role": "assistant", "content": blocks})
    messages.append(
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": use["id"], "content": [image], **CACHED}
            ],
        }
    )
    stack.worker.script = answer_with("Well.</think>I cannot see it.")
    blocks = await claude(stack, messages)
    assert blocks[-1]["text"] == "I cannot see it."
    assert SEEN in prompt_of(stack.worker.requests[-1])
    messages.append({"role": "assistant", "content": blocks})
    messages.append({"role": "user", "content": "hello again"})
    assert (await claude(stack, messages))[-1]["text"] == "I cannot see it."
    assert stack.worker.requests[-1].stop.max_tokens < 16384


async def test_claude_codes_search_and_a_session_of_another_server_go_on(stack: Stack) -> None:
    stack.worker.script = answer_with("Hm.</think>Nothing found.")
    hosted = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]
    choice = {"type": "tool", "name": "web_search"}
    asked = [{"role": "user", "content": "Perform a web search for the query: logo"}]
    [*_, text] = await claude(stack, asked, tools=hosted, tool_choice=choice)
    assert text["text"] == "Nothing found."
    messages = [
        {"role": "user", "content": "Search."},
        {"role": "assistant", "content": [
            {"type": "redacted_thinking", "data": "x"},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": [
                {"type": "web_search_result", "url": "https://a.example", "title": "A",
                 "encrypted_content": "E"}]},
            {"type": "text", "text": "It is so.", "citations": [{"cited_text": "so"}]},
        ]},
        {"role": "user", "content": "Sure?"},
    ]  # fmt: skip
    assert (await claude(stack, messages))[-1]["text"] == "Nothing found."
    assert "It is so." in prompt_of(stack.worker.requests[-1])


async def test_opencode_goes_on_with_an_image_in_its_past(stack: Stack) -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}"}}
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 32000,
        "top_p": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tool_choice": "auto",
        "reasoningSummary": "auto",
        "tools": [{"type": "function", "function": {
            "name": "read", "description": "Reads a file.", "parameters": schema(filePath=PATH)}}],
        "messages": [
            {"role": "system", "content": "You are a coding agent."},
            {"role": "user", "content": [{"type": "text", "text": "Look at this."}, image]},
            {"role": "assistant", "content": "I cannot see it.", "reasoning_content": "Hm.",
             "provider_options": {"a": 1}},
            {"role": "user", "content": [{"type": "text", "text": "Then read it.", **CACHED}]},
        ],
    }  # fmt: skip
    stack.worker.script = answer_with(called("read", {"filePath": "/home/dev/shop/logo.png"}))
    response = await stack.http.post("/v1/chat/completions", json=body)
    deltas = [each["choices"][0]["delta"] for each in events(response) if each["choices"]]
    parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
    arguments = "".join(part["function"].get("arguments", "") for part in parts)
    call = {"id": parts[0]["id"], "type": "function",
            "function": {"name": "read", "arguments": arguments}}  # fmt: skip
    assert response.headers["x-tandem-ignored"] == "reasoningSummary, messages[1].content[1]"
    assert SEEN in prompt_of(stack.worker.requests[-1])
    body["messages"] += [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "PNG"}]},
    ]
    stack.worker.script = answer_with("A picture.")
    deltas = [
        each["choices"][0]["delta"]
        for each in events(await stack.http.post("/v1/chat/completions", json=body))
        if each["choices"]
    ]
    assert "".join(delta.get("content") or "" for delta in deltas) == "A picture."
