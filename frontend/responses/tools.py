"""The tools of a Responses request: functions, and the choice among them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from tandem.frontend.openai.outline import MAX_FIELD_BYTES, begins
from tandem.frontend.typed import NULL, read, read_type, unsupported
from tandem.runtime.errors import InvalidRequestError

MAX_TOOLS = 256
MAX_TOOLS_BYTES = 1024 * 1024
Mode = Literal["none", "auto", "required"]
_decode = msgspec.json.Decoder().decode


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the client runs; a built-in tool would be the server's to run."""

    type: Literal["function"] = "function"
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    description: str | None = None
    parameters: Raw = NULL
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        """Return the tool as a chat has it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not NULL:
            function["parameters"] = self.parameters
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


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


def read_tools(raws: list[Raw], where: str = "tools") -> list[FunctionTool]:
    """Return the functions of a body. Raises InvalidRequestError for a tool of another type."""
    check_tools_size(raws, where)
    tools = []
    for index, raw in enumerate(raws):
        field = f"{where}[{index}]"
        kind = read_type(raw, field)
        if kind != "function":
            raise unsupported(f"{field}.type", kind)
        tools.append(read(FunctionTool, raw, field))
    return tools


def check_tools_size(raws: list[Raw], where: str) -> None:
    """Raise InvalidRequestError for more or larger tools than a body may have."""
    if len(raws) > MAX_TOOLS:
        raise InvalidRequestError(
            f"`{where}` has {len(raws)} entries, the most is {MAX_TOOLS}", param=where
        )
    for index, raw in enumerate(raws):
        if len(raw) > MAX_FIELD_BYTES:
            field = f"{where}[{index}]"
            raise InvalidRequestError(
                f"`{field}` has {len(raw)} bytes, the most is {MAX_FIELD_BYTES}", param=field
            )
    if sum(map(len, raws)) > MAX_TOOLS_BYTES:
        raise InvalidRequestError(f"`{where}` is over {MAX_TOOLS_BYTES} bytes", param=where)


def read_tool_choice(raw: Raw) -> ToolChoice:
    """Return the choice of tools. Raises InvalidRequestError naming the field."""
    if bytes(raw) == b"null":
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
