"""The body of POST /v1/responses, checked field by field."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from tandem.frontend.bodies.ignored import Ignored
from tandem.frontend.bodies.invalid import invalid_field
from tandem.frontend.bodies.outline import begins
from tandem.frontend.bodies.typed import NULL, Count, Natural, read_body, read_schema
from tandem.frontend.chat.constraints import JsonSchema, ResponseFormat
from tandem.frontend.chat.sampling import SamplingFields
from tandem.frontend.chat.thinking import Reasoning as ChatReasoning
from tandem.frontend.chat.thinking import Thinking
from tandem.frontend.responses.items import Placed, Reading, user_message

_LARGE = ("input", "instructions")  # bounded by the body
SCHEMA = "text.format.schema"
_ENCRYPTED = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"
MetaKey = Annotated[str, Meta(max_length=64)]
MetaValue = Annotated[str, Meta(max_length=512)]


class Format(msgspec.Struct, frozen=True):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"] | None = "text"
    name: str | msgspec.UnsetType | None = msgspec.UNSET
    description: str | msgspec.UnsetType | None = msgspec.UNSET
    schema: Raw | msgspec.UnsetType = msgspec.UNSET
    strict: bool | msgspec.UnsetType | None = msgspec.UNSET

    def for_chat(self) -> ResponseFormat:
        """Return the format as a chat has it. Raises InvalidRequestError naming the field."""
        if self.type != "json_schema":
            return ResponseFormat(self.type or "text")
        names = ("name", "description", "strict")
        values = {name: getattr(self, name) for name in names}
        given: dict[str, Any] = {n: v for n, v in values.items() if v is not msgspec.UNSET}
        schema = None if self.schema is msgspec.UNSET else read_schema(self.schema, SCHEMA)
        return ResponseFormat("json_schema", JsonSchema(schema=schema, **given))


class TextConfig(msgspec.Struct, frozen=True):
    """`text` of a request; `verbosity` has no effect."""

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(ChatReasoning, frozen=True):
    """`reasoning` of a request; the answer has the reasoning itself, never a summary."""

    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    """Without effect: no padding is added."""

    include_obfuscation: bool | None = None


class ResponsesRequest(SamplingFields, frozen=True, kw_only=True):
    """The fields of a body. `inputs`, `client_tools` and `choice` read those that are raw."""

    model: str
    input: Raw = NULL
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Raw = NULL
    tool_choice: Raw = NULL
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    previous_response_id: Annotated[str, Meta(max_length=64)] | None = None
    include: list[str] | None = None
    metadata: Annotated[dict[MetaKey, MetaValue], Meta(max_length=16)] | None = None

    # Beyond OpenAI, as in chat.
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking: bool | Thinking | None = None
    include_reasoning: bool | None = None

    truncation: Literal["disabled", "auto"] | None = None  # a prompt that fits is never cut
    top_logprobs: Natural | None = None
    max_tool_calls: Count | None = None  # of built-in tools, and there are none
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def wants_encrypted_reasoning(self) -> bool:
        """True if reasoning items have an `encrypted_content`, which a client sends back."""
        return _ENCRYPTED in (self.include or ())

    @property
    def wants_logprobs(self) -> bool:
        """True if the text of the answer has the log probabilities of its tokens."""
        return _LOGPROBS in (self.include or ())

    def inputs(self, reading: Reading) -> list[Placed]:
        """Return the items of the input. Raises InvalidRequestError naming the field."""
        if begins(self.input, b'"'):
            return [("input", user_message(self.input))]
        if not begins(self.input, b"["):
            raise invalid_field("input", "must be a string or a list")
        return reading.items(self.input, "input")

    def check(self, ignored: Ignored) -> None:
        """Raise InvalidRequestError for values that the types allow and the frontend does not."""
        for index, value in enumerate(self.include or ()):
            if value not in (_ENCRYPTED, _LOGPROBS):
                ignored.add(f"include[{index}]", value)
        if self.top_logprobs and not self.wants_logprobs:
            ignored.add("top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise invalid_field("stream_options", "is only allowed when `stream` is true")


def parse(raw: bytes, ignored: Ignored) -> ResponsesRequest:
    """Return the checked request in `raw`. Raises InvalidRequestError naming the field."""
    request = read_body(ResponsesRequest, raw, _LARGE, ignored)
    request.check(ignored)
    return request
