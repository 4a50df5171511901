"""The tools of a Messages request, and the choice among them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from tandem.frontend.bodies.invalid import invalid_field, unsupported
from tandem.frontend.bodies.outline import is_null, list_of_tools
from tandem.frontend.bodies.typed import NULL, read, read_type


class Tool(msgspec.Struct, frozen=True):
    """A tool that the client runs."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    input_schema: Raw
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Raw = NULL
    input_examples: Raw = NULL
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None

    def for_chat(self) -> dict[str, Any]:
        """Return the tool as a chat has it."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class Choice(msgspec.Struct, frozen=True):
    """The choice among the tools; `name` is that of the type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def for_chat(self) -> str | dict[str, Any]:
        """Return the choice as a chat has it."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


def read_tools(raw: Raw) -> list[Tool]:
    """Return the tools of a body. Raises InvalidRequestError for one that the server would run."""
    tools = []
    for index, each in enumerate(list_of_tools(raw, "tools")):
        field = f"tools[{index}]"
        kind = read_type(each, field, "custom")
        if kind != "custom":
            raise unsupported(f"{field}.type", kind)
        tools.append(read(Tool, each, field))
    return tools


def read_choice(raw: Raw) -> Choice | None:
    """Return the choice among the tools, unless it is null. Raises InvalidRequestError."""
    if is_null(raw):
        return None
    read_type(raw, "tool_choice")
    choice = read(Choice, raw, "tool_choice")
    if (choice.type == "tool") != (choice.name is not None):
        raise invalid_field("tool_choice.name", "comes with the type 'tool', and only with it")
    return choice
