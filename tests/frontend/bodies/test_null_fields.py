"""`null` is the same as leaving a field out, at every level of a body."""

import json
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tandem.frontend.anthropic import blocks
from tandem.frontend.anthropic import tools as anthropic_tools
from tandem.frontend.anthropic.requests import MessagesRequest
from tandem.frontend.bodies.typed import decoded
from tandem.frontend.chat.requests import ChatRequest, CompletionRequest
from tandem.frontend.responses import items
from tandem.frontend.responses import tools as responses_tools
from tandem.frontend.responses.requests import ResponsesRequest

BODIES: list[type[msgspec.Struct]] = [
    ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest,
    blocks.Message, anthropic_tools.Tool, anthropic_tools.Choice, items.Message,
]  # fmt: skip
BY_TYPE: list[type[msgspec.Struct]] = [  # read as such because of their `type`
    blocks.Text, blocks.Thinking, blocks.ToolUse, blocks.ToolResult,
    items.FunctionCall, items.FunctionOutput, items.CustomCall, items.CustomOutput,
    items.ReasoningItem, responses_tools.FunctionTool, responses_tools.CustomTool,
    responses_tools.NamespaceTool, responses_tools.AllowedTools, responses_tools.ToolName,
]  # fmt: skip


def structs_in(kind: Any, seen: dict[type[msgspec.Struct], None]) -> None:
    """Add the structs that a type has in it, at any depth."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in seen:
        seen[kind] = None
        for each in typing.get_type_hints(kind).values():
            structs_in(each, seen)
    for each in typing.get_args(kind):
        structs_in(each, seen)


def all_structs() -> Iterator[type[msgspec.Struct]]:
    seen: dict[type[msgspec.Struct], None] = {}
    for root in BODIES + BY_TYPE:
        structs_in(root, seen)
    return iter(seen)


SAMPLES: dict[Any, object] = {str: "x", int: 1, float: 1.0, bool: True, msgspec.Raw: {}}


def sample(kind: Any) -> object:
    """Return a value of a type, the smallest."""
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return typing.get_args(kind)[0]
    if origin is typing.Annotated:
        return sample(typing.get_args(kind)[0])
    if origin in (list, dict):
        return origin()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return required(kind)
    if args := typing.get_args(kind):
        return sample(args[0])
    return SAMPLES.get(kind, "x")


def required(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return an object with the fields that a struct must have."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        each.encode_name: sample(hints[each.name])
        for each in msgspec.structs.fields(kind)
        if each.required
    }


@pytest.mark.parametrize("kind", list(all_structs()), ids=lambda kind: kind.__name__)
def test_a_field_that_may_be_left_out_may_be_null(kind: type[msgspec.Struct]) -> None:
    body = required(kind)
    decoded(kind, json.dumps(body).encode())
    for each in msgspec.structs.fields(kind):
        if not each.required and not (each.name == "type" and kind in BY_TYPE):
            decoded(kind, json.dumps(body | {each.encode_name: None}).encode())
