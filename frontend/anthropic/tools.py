"""The tools of a Messages request, and the choice among them."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw

from tandem.frontend.bodies.ignored import Ignored
from tandem.frontend.bodies.invalid import invalid_field
from tandem.frontend.bodies.outline import is_null, list_of_tools
from tandem.frontend.bodies.typed import read, read_schema, read_type
from tandem.frontend.chat.tools import ChosenTools, Function, FunctionName, ToolChoice
from tandem.frontend.chat.tools import Tool as ChatTool


class Tool(msgspec.Struct, frozen=True):
    """A tool that the client runs."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    input_schema: Raw
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None

    def for_chat(self, field: str) -> ChatTool:
        """Return the tool as a chat has it. Raises InvalidRequestError naming the field."""
        schema = read_schema(self.input_schema, f"{field}.input_schema")
        return ChatTool("function", Function(self.name, self.description, schema, self.strict))


class Choice(msgspec.Struct, frozen=True):
    """The choice among the tools; `name` is that of the type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def for_chat(self) -> ToolChoice:
        """Return the choice as a chat has it."""
        if self.type == "tool":
            return ChosenTools("function", FunctionName(self.name or ""))
        return "required" if self.type == "any" else self.type


class Tools(msgspec.Struct, frozen=True):
    """The tools of a body, those of the server left out, and the choice among them."""

    given: list[tuple[str, Tool]]  # with their fields
    choice: Choice | None

    @property
    def is_parallel(self) -> bool | None:
        """False for one call at a time."""
        return False if self.choice and self.choice.disable_parallel_tool_use else None

    def for_chat(self) -> list[ChatTool] | None:
        """Return the tools as a chat has them. Raises InvalidRequestError naming the field."""
        return [tool.for_chat(field) for field, tool in self.given] or None


def read_all(tools: Raw, choice: Raw, ignored: Ignored) -> Tools:
    """Return the tools of a body. Raises InvalidRequestError naming the field."""
    given: list[tuple[str, Tool]] = []
    others: set[str | None] = set()
    raws = list_of_tools(tools, "tools")
    for index, each in enumerate(raws):
        field = f"tools[{index}]"
        kind = read_type(each, field, "custom")
        if kind == "custom":
            given.append((field, read(Tool, each, field)))
        else:
            others.add(read(_Named, each, field).name)
            ignored.add(f"{field}.type", kind)
    chosen = _read_choice(choice)
    is_of_server = chosen is not None and (
        (chosen.type == "any" and not given) or (chosen.type == "tool" and chosen.name in others)
    )
    if others and is_of_server:
        ignored.add("tool_choice")
        chosen = None
    return Tools(given, chosen)


class _Named(msgspec.Struct, frozen=True):
    """A tool of which only the name is known."""

    name: str | None = None


def _read_choice(raw: Raw) -> Choice | None:
    """Return the choice among the tools, unless it is null. Raises InvalidRequestError."""
    if is_null(raw):
        return None
    read_type(raw, "tool_choice")
    choice = read(Choice, raw, "tool_choice")
    if (choice.type == "tool") != (choice.name is not None):
        raise invalid_field("tool_choice.name", "comes with the type 'tool', and only with it")
    return choice
