"""Functions and their calls as chats had them before tools, and the tools that they stand for."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.frontend.bodies.invalid import invalid_field
from tandem.frontend.bodies.outline import MAX_TOOLS
from tandem.frontend.chat.messages import ChatMessage, MessageToolCall
from tandem.frontend.chat.origins import Origins
from tandem.frontend.chat.tools import ChosenTools, Function, FunctionName, Tool, ToolChoice

Functions = Annotated[list[Function], Meta(max_length=MAX_TOOLS)]
FunctionChoice = Literal["none", "auto"] | FunctionName


def tools_of(functions: Functions) -> list[Tool]:
    """Return functions as tools."""
    return [Tool("function", each) for each in functions]


def tool_choice_of(choice: FunctionChoice | None) -> ToolChoice | None:
    """Return a choice among functions as one among tools."""
    return ChosenTools("function", choice) if isinstance(choice, FunctionName) else choice


def origins_of(functions: Functions) -> Origins:
    """Return the paths of a chat whose tools are functions."""
    return Origins(
        listed="functions",
        choice="function_call",
        chosen="function_call.name",
        tools=[f"functions[{index}]" for index in range(len(functions))],
    )


def with_tool_calls(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return messages with calls of tools beside those of functions, and results in their form.

    A call gets an id of nine letters and digits, as the strictest chat template has it. Raises
    InvalidRequestError naming the field.
    """
    found: list[ChatMessage] = []
    call_id = ""
    for index, message in enumerate(messages):
        if message.function_call is not None:
            field = f"messages[{index}].function_call"
            if message.role != "assistant":
                raise invalid_field(field, f"is for the role 'assistant', not {message.role!r}")
            if message.tool_calls:
                raise invalid_field(field, "and `tool_calls` exclude each other")
            call_id = f"call{index:05}"
            call = MessageToolCall(id=call_id, type="function", function=message.function_call)
            message = msgspec.structs.replace(message, tool_calls=[call])
        elif message.role == "function":
            if message.tool_call_id is not None:
                field = f"messages[{index}].tool_call_id"
                raise invalid_field(field, "is for the role 'tool', not 'function'")
            message = msgspec.structs.replace(message, role="tool", tool_call_id=call_id)
        found.append(message)
    return found
