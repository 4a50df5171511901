"""The forms in which a chat template may want a conversation.

There is no one form that all templates take: most want the arguments of a call as an object, some
as text, and some fail where a tool has no description. The first form that a template renders is
the one its model was trained on.
"""

import hashlib
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import msgspec

Message = dict[str, Any]
Content = str | list[dict[str, str]]
_ID_LENGTH = 9  # of Mistral's call ids
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
    if (completed := _with_all_fields(tools)) != tools:
        toolsets.append(completed)
    for messages in _conversations(variables["messages"]):
        for toolset in toolsets:
            yield {**variables, "messages": messages, "tools": toolset}


def _conversations(given: list[Message]) -> Iterator[list[Message]]:
    """Yield the messages with arguments as objects and as text; then as simple as they can be.

    Some templates refuse two messages of a role, two calls in a message, ids of another length, or
    reasoning beside the content of a message that calls.
    """
    seen: list[list[Message]] = []
    for simplify in (list, _with_joined_turns, _with_single_calls, _without_reasoning):
        simpler = simplify(seen[-1] if seen else given)
        if simpler in seen:
            continue
        seen.append(simpler)
        with_objects = list(map(_with_objects, simpler))
        yield with_objects
        if with_objects != simpler:
            yield simpler


def _with_joined_turns(messages: list[Message]) -> list[Message]:
    """Return one message for those of one role, and a user's text with the result before it."""
    kept: list[Message] = []
    for message in messages:
        role, last = message["role"], kept[-1] if kept else {"role": ""}
        is_more_of_user = role == "user" and last["role"] in ("user", "tool")
        is_more_of_answer = role == last["role"] == "assistant" and "tool_calls" not in last
        if is_more_of_user or is_more_of_answer:
            contents = [content for content in (last["content"], message["content"]) if content]
            joined = message | last | {"content": _joined(contents)}
            kept[-1] = joined
        else:
            kept.append(message)
    return kept


def _joined(contents: list[Content]) -> Content:
    texts = [each for each in contents if isinstance(each, str)]
    if len(texts) == len(contents):
        return "\n\n".join(texts)
    return [part for content in contents for part in as_parts(content)]


def as_parts(content: Content) -> list[dict[str, str]]:
    """Return the content of a message as a list of its parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _with_single_calls(messages: list[Message]) -> list[Message]:
    """Return each call in a message of its own before its results, and with an id of nine."""
    kept: list[Message] = []
    taken: set[int] = set()  # places of results that stand behind their calls now
    for index, message in enumerate(messages):
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            kept += [] if index in taken else [_with_short_ids(message)]
            continue
        rest = range(index + 1, len(messages))
        results = list(takewhile(lambda place: messages[place]["role"] == "tool", rest))
        for number, call in enumerate(calls):
            alone = {"role": "assistant", "content": ""} if number else message
            kept.append(_with_short_ids(alone | {"tool_calls": [call]}))
            for place in results:
                if place not in taken and messages[place]["tool_call_id"] == call["id"]:
                    taken.add(place)
                    kept.append(_with_short_ids(messages[place]))
    return kept


def _with_short_ids(message: Message) -> Message:
    if "tool_call_id" in message:
        return message | {"tool_call_id": _short_id(message["tool_call_id"])}
    if "tool_calls" not in message:
        return message
    calls = [call | {"id": _short_id(call["id"])} for call in message["tool_calls"]]
    return message | {"tool_calls": calls}


def _short_id(call_id: str) -> str:
    if len(call_id) == _ID_LENGTH and call_id.isalnum() and call_id.isascii():
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=_ID_LENGTH).hexdigest()[:_ID_LENGTH]


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


def _without_reasoning(messages: list[Message]) -> list[Message]:
    return [
        {name: value for name, value in message.items() if name not in _REASONING}
        for message in messages
    ]


def _with_all_fields(tools: object) -> object:
    """Return tools whose functions have all fields. What a client gave instead is left as it is."""
    if tools is None:
        return []
    return list(map(_completed, tools)) if isinstance(tools, list) else tools


def _completed(tool: object) -> object:
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        return tool
    function = dict(tool["function"])
    function.setdefault("description", "")
    function.setdefault("parameters", {"type": "object", "properties": {}})
    return tool | {"function": function}
