"""The tools of a chat and the choice among them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.frontend.bodies.invalid import invalid_field
from tandem.runtime.printable import short


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[a-zA-Z0-9_.:/-]+\Z")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool that the client runs."""

    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function, by its name."""

    name: str


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The one tool that the answer has to call."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def check_tools(tools: list[Tool], choice: ToolChoice | None) -> None:
    """Raise InvalidRequestError for two tools of one name, and for a choice of none of them."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in names:
            field = f"tools[{index}].function.name"
            raise invalid_field(field, f"is {short(tool.function.name)!r}, as that of another tool")
        names.add(tool.function.name)
    if choice is None or choice == "none" or (choice == "auto" and not tools):
        return
    if not tools:
        raise invalid_field("tool_choice", "needs `tools`")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise invalid_field(
            "tool_choice.function.name",
            f"is {short(choice.function.name)!r}, which is none of the `tools`",
        )
