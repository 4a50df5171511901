"""The tools of a Responses request: functions, and the choice among them."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from tandem.frontend.bodies.invalid import unsupported
from tandem.frontend.bodies.outline import begins, is_null, list_of_tools
from tandem.frontend.bodies.typed import NULL, read, read_type

Mode = Literal["none", "auto", "required"]
_decode = msgspec.json.Decoder().decode


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the client runs; a built-in tool would be the server's to run."""

    type: Literal["function"] = "function"
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    description: str | None = None
    parameters: Raw = NULL
    strict: bool | None = None

    def for_chat(self, namespace: str | None = None) -> dict[str, Any]:
        """Return the tool as a chat has it."""
        function: dict[str, Any] = {"name": chat_name(namespace, self.name)}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not NULL:
            function["parameters"] = self.parameters
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class NamespaceTool(msgspec.Struct, frozen=True, kw_only=True):
    """Functions under a common name."""

    type: Literal["namespace"] = "namespace"
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    tools: Raw
    description: str | None = None

    def functions(self) -> list[FunctionTool]:
        """Return the functions. They have been checked."""
        return [read(FunctionTool, raw, "tools") for raw in list_of_tools(self.tools, "tools")]


Tool = FunctionTool | NamespaceTool


def chat_name(namespace: str | None, name: str) -> str:
    """Return the name of a function in a chat, which has no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


class ToolName(msgspec.Struct, frozen=True):
    """A function, by its name."""

    name: str
    type: Literal["function"] = "function"


class AllowedTools(msgspec.Struct, frozen=True):
    """Some of the tools, as the only ones of this answer."""

    tools: list[ToolName]
    mode: Literal["auto", "required"] = "auto"
    type: Literal["allowed_tools"] = "allowed_tools"


ToolChoice = Mode | ToolName | AllowedTools


def read_tools(raw: Raw) -> list[Tool]:
    """Return the tools of a body. Raises InvalidRequestError for a tool of the server."""
    tools: list[Tool] = []
    for tool, where in _typed(list_of_tools(raw, "tools"), "tools"):
        if isinstance(tool, NamespaceTool):
            for inner, field in _typed(
                list_of_tools(tool.tools, f"{where}.tools"), f"{where}.tools"
            ):
                if isinstance(inner, NamespaceTool):
                    raise unsupported(f"{field}.type", inner.type)
        tools.append(tool)
    return tools


def _typed(raws: list[Raw], where: str) -> Iterator[tuple[Tool, str]]:
    """Yield the tools of a list with their places."""
    for index, raw in enumerate(raws):
        field = f"{where}[{index}]"
        kind = read_type(raw, field)
        if kind == "function":
            yield read(FunctionTool, raw, field), field
        elif kind == "namespace":
            yield read(NamespaceTool, raw, field), field
        else:
            raise unsupported(f"{field}.type", kind)


def read_tool_choice(raw: Raw) -> ToolChoice:
    """Return the choice of tools. Raises InvalidRequestError naming the field."""
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
    if kind != "function":
        raise unsupported("tool_choice.type", kind)
    return read(ToolName, raw, "tool_choice")
