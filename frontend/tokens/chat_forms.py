"""The forms in which a chat template may want a conversation.

There is no one form that all templates take: most want the arguments of a call as an object, some
as text, and some fail where a tool has no description. The first form that a template renders is
the one its model was trained on.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

Message = dict[str, Any]
_REASONING = ("reasoning_content", "thinking", "reasoning")  # the names that templates read


def with_reasoning(message: Message, reasoning: str) -> Message:
    """Return a message of the assistant with its reasoning, under the names of all templates."""
    return message | dict.fromkeys(_REASONING, reasoning)


def forms(variables: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the variables of a template in one form after another, that of most templates first.

    The arguments of calls are text in `variables`.
    """
    tools = variables["tools"]
    toolsets = [tools]
    if tools and (completed := list(map(_completed, tools))) != tools:
        toolsets.append(completed)
    for messages in _conversations(variables["messages"]):
        for toolset in toolsets:
            yield {**variables, "messages": messages, "tools": toolset}


def _conversations(given: list[Message]) -> Iterator[list[Message]]:
    """Yield the messages with the arguments as objects, as text, and both without reasoning.

    Some templates refuse reasoning beside the content of a message that calls.
    """
    with_objects = list(map(_with_objects, given))
    yield with_objects
    if with_objects != given:
        yield given
    without = list(map(_without_reasoning, given))
    if without != given:
        yield from _conversations(without)


def _with_objects(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        call
        | {"function": call["function"] | {"arguments": as_object(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def as_object(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call. Text that is no JSON object is under the key `arguments`.

    A model may write anything, and an answer may be cut in a call.
    """
    try:
        value = msgspec.json.decode(arguments) if arguments.strip() else None
    except (msgspec.DecodeError, RecursionError):
        value = arguments
    if isinstance(value, dict):
        return value
    return {} if value is None else {"arguments": arguments}


def _without_reasoning(message: Message) -> Message:
    return {name: value for name, value in message.items() if name not in _REASONING}


def _completed(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool with all fields of a function."""
    function = dict(tool["function"])
    function.setdefault("description", "")
    function.setdefault("parameters", {"type": "object", "properties": {}})
    return tool | {"function": function}
