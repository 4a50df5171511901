"""The tools of a Responses request: functions, and the choice among them."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from tandem.frontend.bodies.ignored import Ignored
from tandem.frontend.bodies.invalid import invalid_field, unsupported
from tandem.frontend.bodies.outline import MAX_TOOLS, begins, is_null, list_of_tools
from tandem.frontend.bodies.typed import NULL, read, read_schema, read_type
from tandem.frontend.chat.tools import AllowedTools as ChatAllowed
from tandem.frontend.chat.tools import ChosenTools, Function, FunctionName, NamedTool
from tandem.frontend.chat.tools import Tool as ChatTool
from tandem.frontend.chat.tools import ToolChoice as ChatChoice

Mode = Literal["none", "auto", "required"]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
_decode = msgspec.json.Decoder().decode
_INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the client runs; a built-in tool would be the server's to run."""

    type: Literal["function"] = "function"
    name: Name
    description: str | None = None
    parameters: Raw = NULL
    strict: bool | None = None

    def function(self, name: str, field: str) -> Function:
        """Return the function of a chat. Raises InvalidRequestError naming the field."""
        schema = read_schema(self.parameters, f"{field}.parameters")
        return Function(name, self.description, schema, self.strict)


class CustomTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of the client whose input is a text; in a chat a function with this one argument."""

    type: Literal["custom"] = "custom"
    name: Name
    description: str | None = None
    format: Raw = NULL

    def function(self, name: str, field: str) -> Function:
        """Return the function of a chat, with the form of its input in the description."""
        form = "" if is_null(self.format) else f"Format of the input: {bytes(self.format).decode()}"
        return Function(name, "\n".join(filter(None, (self.description, form))), _INPUT)


class NamespaceTool(msgspec.Struct, frozen=True, kw_only=True):
    """Functions under a common name."""

    type: Literal["namespace"] = "namespace"
    name: Name
    tools: Raw
    description: str | None = None


Tool = FunctionTool | CustomTool | NamespaceTool


def chat_name(namespace: str | None, name: str) -> str:
    """Return the name of a function in a chat, which has no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


class ToolName(msgspec.Struct, frozen=True):
    """A function, by its name."""

    name: str
    type: Literal["function", "custom"] = "function"


class _AnyName(msgspec.Struct, frozen=True):
    """A tool of any type. Those of the server have no name."""

    name: str | None = None
    type: str | None = None


class AllowedTools(msgspec.Struct, frozen=True):
    """Some of the tools, as the only ones of this answer."""

    tools: list[_AnyName]
    mode: Literal["auto", "required"] | None = "auto"
    type: Literal["allowed_tools"] = "allowed_tools"


ToolChoice = Mode | ToolName | AllowedTools


class CallableTool(msgspec.Struct, frozen=True):
    """A tool that the model may call, with its place in the body."""

    field: str
    namespace: str | None
    tool: FunctionTool | CustomTool

    @property
    def name(self) -> str:
        """Its name in the chat."""
        return chat_name(self.namespace, self.tool.name)


class Tools(msgspec.Struct, frozen=True):
    """The tools of a body, those of the server left out, and the choice among them."""

    given: list[Tool]
    callables: list[CallableTool]
    choice: ToolChoice

    def for_chat(self) -> list[ChatTool] | None:
        """Return the tools as a chat has them. Raises InvalidRequestError naming the field."""
        functions = [each.tool.function(each.name, each.field) for each in self.callables]
        return [ChatTool("function", each) for each in functions] or None

    def choice_for_chat(self) -> ChatChoice | None:
        """Return the choice as a chat has it."""
        match self.choice:
            case ToolName(name=name):
                return ChosenTools("function", FunctionName(name))
            case AllowedTools(tools=tools, mode=mode):
                names = {each.name for each in tools}
                allowed = [each for each in self.callables if each.tool.name in names]
                named = [NamedTool(function=FunctionName(each.name)) for each in allowed]
                return ChosenTools("allowed_tools", None, ChatAllowed(named, mode or "auto"))
            case mode:
                return mode if mode != "auto" or self.callables else None


def read_all(tools: Raw, choice: Raw, ignored: Ignored) -> Tools:
    """Return the tools of a body. Raises InvalidRequestError naming the field."""
    given: list[Tool] = []
    callables: list[CallableTool] = []
    raws = list_of_tools(tools, "tools")
    for tool, field in _typed(raws, "tools", ignored):
        given.append(tool)
        if not isinstance(tool, NamespaceTool):
            callables.append(CallableTool(field, None, tool))
            continue
        where = f"{field}.tools"
        for inner, place in _typed(list_of_tools(tool.tools, where), where, ignored):
            if isinstance(inner, NamespaceTool):
                raise unsupported(f"{place}.type", inner.type)
            callables.append(CallableTool(place, tool.name, inner))
    if len(callables) > MAX_TOOLS:
        raise invalid_field("tools", f"has {len(callables)} functions, the most is {MAX_TOOLS}")
    chosen = _read_choice(choice, ignored if len(given) < len(raws) else None)
    if chosen == "required" and not callables and raws:
        ignored.add("tool_choice")
        chosen = "auto"
    return Tools(given, callables, chosen)


def _typed(raws: list[Raw], where: str, ignored: Ignored) -> Iterator[tuple[Tool, str]]:
    """Yield the tools of a list with their places, without those that the server would run."""
    for index, raw in enumerate(raws):
        field = f"{where}[{index}]"
        kind = read_type(raw, field)
        if kind == "function":
            yield read(FunctionTool, raw, field), field
        elif kind == "custom":
            yield read(CustomTool, raw, field), field
        elif kind == "namespace":
            yield read(NamespaceTool, raw, field), field
        else:
            ignored.add(f"{field}.type", kind)


def _read_choice(raw: Raw, ignored: Ignored | None) -> ToolChoice:
    """Return the choice of tools. One of the server's is left out, if there is `ignored`.

    Raises InvalidRequestError naming the field.
    """
    if is_null(raw):
        return "auto"
    if begins(raw, b'"'):
        mode = _decode(raw)
        for known in ("none", "auto", "required"):
            if mode == known:
                return known
        raise unsupported("tool_choice", mode)
    kind = read_type(raw, "tool_choice")
    if kind == "allowed_tools":
        return read(AllowedTools, raw, "tool_choice")
    if kind in ("function", "custom"):
        return read(ToolName, raw, "tool_choice")
    if ignored is None:
        raise unsupported("tool_choice.type", kind)
    ignored.add("tool_choice.type", kind)
    return "auto"


def text_of_input(arguments: str) -> str:
    """Return the text that a model gives to a custom tool; all of it, if it is not the argument."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
