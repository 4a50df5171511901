"""The bodies of Anthropic's Messages API, checked field by field, and the chats they stand for.

`cache_control` is accepted everywhere: prefixes are cached without it.
"""

from typing import Any, Literal

import msgspec
from msgspec import Raw

from tandem.frontend.anthropic.blocks import Conversation
from tandem.frontend.anthropic.tools import read_choice, read_tools
from tandem.frontend.bodies.typed import NULL, Count, Effort, Natural, Share

LARGE = ("messages", "system")  # bounded by the body


class Thinking(msgspec.Struct, frozen=True):
    """`thinking` of a request; the budget has no effect."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    """A JSON schema that the answer follows."""

    schema: Raw
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`output_config` of a request."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class Edit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An edit of the conversation that leaves it as it is."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Edits of the conversation before it is answered; none of them can change it."""

    edits: list[Edit] = []


class Conversing(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that a message and the counting of its tokens have in common."""

    model: str
    messages: Raw = NULL
    system: Raw = NULL
    tools: Raw = NULL
    tool_choice: Raw = NULL
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Raw = NULL
    context_management: ContextManagement | None = None

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of the chat. Raises InvalidRequestError naming the field."""
        conversation = Conversation()
        conversation.add_system(self.system)
        conversation.add_all(self.messages)
        fields: dict[str, Any] = {"model": self.model, "messages": conversation.messages}
        if conversation.is_begun_answer:
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.thinking is not None and self.thinking.type == "disabled":
            fields["reasoning_effort"] = "none"
        elif self.output_config is not None and self.output_config.effort is not None:
            fields["reasoning_effort"] = self.output_config.effort
        if self.output_config is not None and self.output_config.format is not None:
            schema = {"name": "answer", "schema": self.output_config.format.schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields | self._tool_fields()

    def _tool_fields(self) -> dict[str, Any]:
        tools, choice = read_tools(self.tools), read_choice(self.tool_choice)
        fields: dict[str, Any] = {"tools": [tool.for_chat() for tool in tools]} if tools else {}
        if choice is not None:
            fields["tool_choice"] = choice.for_chat()
            if choice.disable_parallel_tool_use:
                fields["parallel_tool_calls"] = False
        return fields


class MessagesRequest(Conversing, frozen=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Natural | None = None

    # Accepted without effect, or for one value, because official clients send them.
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard"] | None = None

    def chat_fields(self) -> dict[str, Any]:
        fields = super().chat_fields()
        given = {
            "max_tokens": self.max_tokens,
            "stream": self.stream,
            "stop": self.stop_sequences or None,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        return fields | {name: value for name, value in given.items() if value is not None}
