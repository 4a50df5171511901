"""Tools of a conversation, and the form of their calls."""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as the chat template lists it."""

    name: str
    parameters: dict[str, str]  # name |-> type
    description: str
    topic: str = ""  # of the questions that it answers beside its own

    @property
    def line(self) -> str:
        """The line of the tool in the system message."""
        parameters = ", ".join(f"{name}: {kind}" for name, kind in self.parameters.items())
        return f"{self.name}({parameters}) {self.description}".strip()


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A question that one call of a tool answers."""

    tool: Tool
    question: str
    arguments: dict[str, Any]
    subject: str  # of the question, for thoughts
    result: str
    answer: str

    @property
    def call(self) -> str:
        """The call in hermes format."""
        call = {"name": self.tool.name, "arguments": self.arguments}
        return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def tool_section(tools: list[Tool]) -> str:
    """Return the part of the system message that lists the tools, as the chat template does."""
    lines = [tool.line for tool in tools]
    return "\n".join(["You can call tools in <tool_call></tool_call>:", *lines])
