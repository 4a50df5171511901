"""The bodies of Anthropic's Messages API, checked field by field, and the chats they stand for.

`cache_control` is a note everywhere: prefixes are cached without it.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from tandem.frontend.anthropic.blocks import Conversation
from tandem.frontend.anthropic.tools import read_all
from tandem.frontend.bodies.ignored import Ignored
from tandem.frontend.bodies.images import Images
from tandem.frontend.bodies.typed import NULL, Count, Effort, read_schema
from tandem.frontend.chat.constraints import JsonSchema, ResponseFormat
from tandem.frontend.chat.origins import Origins
from tandem.frontend.chat.requests import Chat
from tandem.frontend.chat.sampling import SamplingFields
from tandem.frontend.chat.thinking import Reasoning, Thinking

LARGE = ("messages", "system")  # bounded by the body
_SCHEMA = "output_config.format.schema"


class OutputFormat(msgspec.Struct, frozen=True):
    """A JSON schema that the answer follows."""

    schema: Raw
    type: Literal["json_schema"] | None = "json_schema"

    def for_chat(self) -> ResponseFormat:
        """Return the format as a chat has it. Raises InvalidRequestError naming the field."""
        schema = JsonSchema("answer", schema=read_schema(self.schema, _SCHEMA))
        return ResponseFormat("json_schema", schema)


class OutputConfig(msgspec.Struct, frozen=True):
    """`output_config` of a request."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class Edit(msgspec.Struct, frozen=True):
    """An edit of the conversation; one that keeps all leaves it as it is."""

    type: str
    keep: Any = None


class ContextManagement(msgspec.Struct, frozen=True):
    """Edits of the conversation before it is answered; none is made."""

    edits: Annotated[list[Edit], Meta(max_length=64)] | None = None


class Conversing(SamplingFields, frozen=True, kw_only=True):
    """The fields that a message and the counting of its tokens have in common."""

    model: str
    messages: Raw = NULL
    system: Raw = NULL
    tools: Raw = NULL
    tool_choice: Raw = NULL
    thinking: Thinking | bool | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None

    # Beyond Anthropic, as in chat.
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    reasoning: Reasoning | None = None

    def chat(self, ignored: Ignored, images: Images | None, *, images_as_text: bool) -> Chat:
        """Return the chat. Raises InvalidRequestError naming the field.

        `images` is None for a model that sees none.
        """
        conversation = Conversation(ignored, images, images_as_text=images_as_text)
        conversation.add_system(self.system)
        conversation.add_all(self.messages)
        self._check_edits(ignored)
        tools = read_all(self.tools, self.tool_choice, ignored)
        config = self.output_config or OutputConfig()
        is_off = isinstance(self.thinking, Thinking) and self.thinking.type == "disabled"
        is_begun = conversation.is_begun_answer
        return Chat(
            model=self.model,
            messages=conversation.messages,
            tools=tools.for_chat(),
            tool_choice=None if tools.choice is None else tools.choice.for_chat(),
            parallel_tool_calls=tools.is_parallel,
            reasoning_effort="none" if is_off or self.thinking is False else config.effort,
            thinking=self.thinking,
            chat_template_kwargs=self.chat_template_kwargs,
            enable_thinking=self.enable_thinking,
            include_reasoning=self.include_reasoning,
            reasoning=self.reasoning,
            response_format=None if config.format is None else config.format.for_chat(),
            continue_final_message=is_begun or None,
            add_generation_prompt=False if is_begun else None,
            origins=Origins(
                continued="messages",
                stop="stop_sequences",
                format="output_config.format",
                schema=_SCHEMA,
                chosen="tool_choice.name",
                parameters="input_schema",
                tools=[field for field, _ in tools.given],
                messages=conversation.origins,
            ),
        )

    def _check_edits(self, ignored: Ignored) -> None:
        edits = self.context_management and self.context_management.edits
        for index, edit in enumerate(edits or ()):
            if (edit.type, edit.keep) != ("clear_thinking_20251015", "all"):
                ignored.add(f"context_management.edits[{index}].type", edit.type)


class MessagesRequest(Conversing, frozen=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: list[str] | None = None

    def chat(self, ignored: Ignored, images: Images | None, *, images_as_text: bool) -> Chat:
        return msgspec.structs.replace(
            super().chat(ignored, images, images_as_text=images_as_text),
            max_tokens=self.max_tokens,
            stream=self.stream,
            stop=self.stop_sequences or None,
            **self.sampling(),
        )
