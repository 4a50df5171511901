"""The tools of a chat and the choice among them."""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.frontend.bodies.ignored import Ignored
from tandem.frontend.bodies.invalid import invalid_field, unsupported
from tandem.frontend.chat.origins import OF_CHAT, Origins
from tandem.runtime.printable import short

Type = Annotated[str, Meta(max_length=64)]
Mode = Literal["none", "auto", "required"]
_NAME = re.compile(r"[a-zA-Z0-9_.:/-]+")


class Function(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool. One that the server would run has another type, and no function."""

    type: Type | None = None  # "function"
    function: Function | None = None


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the client runs, as a chat template gets it."""

    type: Literal["function"] = "function"
    function: Function


class FunctionName(msgspec.Struct, frozen=True):
    """A function, by its name."""

    name: str


class NamedTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool, by its name; one that the server would run has a type only."""

    type: Type | None = None  # "function"
    function: FunctionName | None = None


class AllowedTools(msgspec.Struct, frozen=True, omit_defaults=True):
    """Some of the tools, as the only ones of this answer."""

    tools: Annotated[list[NamedTool], Meta(max_length=256)]
    mode: Literal["auto", "required"] | None = None


class ChosenTools(NamedTool, frozen=True, omit_defaults=True):
    """The one tool that the answer has to call, or those that it may call."""

    allowed_tools: AllowedTools | None = None


ToolChoice = Mode | ChosenTools


class Tools(msgspec.Struct, frozen=True):
    """The functions that an answer may call, with their fields, and whether it has to."""

    functions: list[tuple[str, Function]] = []  # their fields in the body
    mode: Mode = "auto"
    called: str | None = None  # the function that the answer has to call


NO_TOOLS = Tools()


def chosen_tools(
    tools: list[Tool], choice: ToolChoice | None, ignored: Ignored, origins: Origins = OF_CHAT
) -> Tools:
    """Return the tools of an answer. Those that the server would run are left out.

    Raises InvalidRequestError for two tools of one name, and for a choice of none of them.
    """
    functions = _functions(tools, ignored, origins)
    has_others = len(functions) < len(tools)
    if choice is None or isinstance(choice, str):
        if choice == "required" and not functions:
            if not has_others:
                raise invalid_field(origins.choice, f"needs `{origins.listed}`")
            ignored.add("tool_choice")
            choice = "auto"
        return Tools([] if choice == "none" else functions, choice or "auto")
    if choice.type == "allowed_tools":
        if choice.allowed_tools is None:
            raise invalid_field("tool_choice.allowed_tools", "is required")
        names = {each.function.name for each in choice.allowed_tools.tools if each.function}
        allowed = [each for each in functions if each[1].name in names]
        if not allowed and choice.allowed_tools.mode == "required":
            raise invalid_field(origins.allowed, "has none of the `tools`")
        return Tools(allowed, choice.allowed_tools.mode or "auto")
    if choice.type not in (None, "function"):
        if not has_others:
            raise unsupported("tool_choice.type", choice.type)
        ignored.add("tool_choice.type", choice.type)
        return Tools(functions)
    if choice.function is None:
        raise invalid_field("tool_choice.function", "is required")
    if not tools:
        raise invalid_field(origins.choice, f"needs `{origins.listed}`")
    name = choice.function.name
    if name not in {each.name for _, each in functions}:
        reason = f"is {short(name)!r}, which is none of the `{origins.listed}`"
        raise invalid_field(origins.chosen, reason)
    return Tools(functions, "required", name)


def _functions(tools: list[Tool], ignored: Ignored, origins: Origins) -> list[tuple[str, Function]]:
    """Return the functions among the tools, with their fields."""
    functions: list[tuple[str, Function]] = []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.type not in (None, "function"):
            ignored.add(f"tools[{index}].type", tool.type)
            continue
        field = origins.tool(index)
        if tool.function is None:
            raise invalid_field(field, "is required")
        name = tool.function.name
        if not _NAME.fullmatch(name):
            reason = f"is {short(name)!r}; a name has letters, digits and any of _.:/- only"
            raise invalid_field(f"{field}.name", reason)
        if name in names:
            raise invalid_field(f"{field}.name", f"is {short(name)!r}, as that of another tool")
        names.add(name)
        functions.append((field, tool.function))
    return functions
