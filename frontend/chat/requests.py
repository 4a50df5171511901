"""The bodies of OpenAI's chat and completions requests, checked field by field.

Types are strict, as they are at OpenAI: a number in a string is refused.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
from msgspec import Meta

from tandem.frontend.bodies.ignored import Ignored
from tandem.frontend.bodies.images import Images
from tandem.frontend.bodies.invalid import invalid_field
from tandem.frontend.bodies.outline import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_PROMPT_TOKENS,
    PROMPT_FORMS,
    check_lists,
)
from tandem.frontend.bodies.typed import Count, Natural, decoded, read_body_fields
from tandem.frontend.chat.body import RequestBody
from tandem.frontend.chat.functions import (
    FunctionChoice,
    Functions,
    origins_of,
    tool_choice_of,
    tools_of,
    with_tool_calls,
)
from tandem.frontend.chat.messages import ChatMessage, ImagePart, TemplateMessage
from tandem.frontend.chat.origins import OF_CHAT, OF_PROMPT, Origins
from tandem.frontend.chat.parts import is_text, with_read_parts
from tandem.frontend.chat.sampling import MAX_TOKEN_ID
from tandem.frontend.chat.thinking import ThinkingFields
from tandem.frontend.chat.tools import (
    NO_TOOLS,
    FunctionTool,
    Tool,
    ToolChoice,
    Tools,
    chosen_tools,
)
from tandem.frontend.config import FrontendConfig
from tandem.runtime.errors import InvalidRequestError

Body = TypeVar("Body", bound=RequestBody)
_MAX_DOCUMENTS = 256
_LARGE = ("messages", "prompt")  # bounded by the body
_encode = msgspec.json.Encoder().encode


class ChatRequest(ThinkingFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Natural | None = None
    modalities: list[Literal["text"]] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Functions | None = None  # the older form of `tools`
    function_call: FunctionChoice | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: Literal[False] | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=_MAX_DOCUMENTS)] | None = None

    @property
    def origins(self) -> Origins:
        return OF_CHAT if self.functions is None else origins_of(self.functions)

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate, under either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Number of best tokens to list beside the chosen one; None lists no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def scores_prompt(self) -> bool:
        """True when the answer lists the log probabilities of the prompt's tokens."""
        return self.prompt_logprobs is not None

    @property
    def chosen(self) -> Tools:
        """The tools that the answer may call, or has to. They have been checked."""
        if not self.tools:
            return NO_TOOLS
        return chosen_tools(self.tools, self.tool_choice, Ignored(), self.origins)

    def with_tools(self) -> Self:
        """Return the chat with tools in the place of functions, of which an answer calls one.

        It still has `functions`, by which its answer is written. Raises InvalidRequestError naming
        the field.
        """
        chat = msgspec.structs.replace(self, messages=with_tool_calls(self.messages))
        if self.functions is None:
            if self.function_call is not None:
                raise invalid_field("function_call", "needs `functions`")
            return chat
        for name in ("tools", "tool_choice"):
            if getattr(self, name) is not None:
                raise invalid_field(name, "and `functions` exclude each other")
        return msgspec.structs.replace(
            chat,
            tools=tools_of(self.functions),
            tool_choice=tool_choice_of(self.function_call),
            parallel_tool_calls=False,
        )

    @property
    def images(self) -> list[ImagePart]:
        """The images of all messages, in the prompt's order."""
        return [image for message in self.messages for image in message.images]

    def conversation(self) -> list[TemplateMessage]:
        """Return the messages for a chat template. Raises InvalidRequestError naming a field."""
        return [
            message.for_template(f"messages[{index}]")
            for index, message in enumerate(self.messages)
        ]

    def template_variables(self, *, shows_unused_tools: bool = False) -> dict[str, Any]:
        """Return the variables of the chat template beside the messages.

        Tools that the answer may not call are among them with `shows_unused_tools`.
        `chat_template_kwargs` take precedence over those that other fields stand for.
        """
        variables: dict[str, Any] = {}
        shown = self.chosen
        if shows_unused_tools and self.tools:
            shown = chosen_tools(self.tools, None, Ignored(), self.origins)
        if shown.functions:
            tools = [FunctionTool(function=each) for _, each in shown.functions]
            variables["tools"] = msgspec.to_builtins(tools)
        if self.documents is not None:
            variables["documents"] = self.documents
        return variables | self.thinking_variables() | (self.chat_template_kwargs or {})

    def check(self, config: FrontendConfig, ignored: Ignored) -> None:
        super().check(config, ignored)
        self._check_continuation()
        chosen_tools(self.tools or [], self.tool_choice, ignored, self.origins)
        if (self.top_logprobs or 0) > config.max_top_logprobs:
            raise invalid_field(
                "top_logprobs", f"is {self.top_logprobs}, the most is {config.max_top_logprobs}"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid_field("top_logprobs", "is only allowed when `logprobs` is true")

    def _check_continuation(self) -> None:
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            raise invalid_field(
                "continue_final_message", "and `add_generation_prompt` exclude each other"
            )
        last = self.messages[-1]
        if last.role != "assistant" or last.tool_calls:
            raise invalid_field(
                "continue_final_message", "needs a last message of the assistant, without calls"
            )


class Chat(ChatRequest, frozen=True, kw_only=True):
    """A chat that a body of another API stands for. Its messages are text and seen images."""

    origins: Origins

    def check_messages(self) -> None:
        """Raise InvalidRequestError for a number of messages or calls beyond a chat's bounds."""
        num, num_calls = len(self.messages), sum(len(m.tool_calls or ()) for m in self.messages)
        if not 1 <= num <= MAX_MESSAGES:
            reason = f"has {num} entries; it must have 1 to {MAX_MESSAGES}"
            raise invalid_field(self.origins.prompt, reason)
        if num_calls > MAX_CONTENT_PARTS:
            reason = f"has {num_calls} tool calls, the most is {MAX_CONTENT_PARTS}"
            raise invalid_field(self.origins.prompt, reason)

    def in_openais_shape(self) -> bytes:
        """Return the body of the chat for a worker that reads text."""
        fields = {name: getattr(self, name) for name in ChatRequest.__struct_fields__}
        return _encode({name: value for name, value in fields.items() if value is not None})


class CompletionRequest(RequestBody, frozen=True, kw_only=True):
    """POST /v1/completions."""

    refused = RequestBody.refused | {"functions", "function_call"}

    prompt: str | list[Any]
    max_tokens: Natural | None = None  # 0: the prompt alone
    best_of: Count | None = None
    echo: bool | None = None
    logprobs: Natural | None = None

    @property
    def origins(self) -> Origins:
        return OF_PROMPT

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate; OpenAI's default is 16."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Number of best tokens to list beside the chosen one; None lists no log probabilities."""
        return self.logprobs

    @property
    def echoes_logprobs(self) -> bool:
        """True when the log probabilities of the answer begin with those of the prompt."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def scores_prompt(self) -> bool:
        """True when the answer lists the log probabilities of the prompt's tokens too."""
        return self.echoes_logprobs or self.prompt_logprobs is not None

    def prompts(self, config: FrontendConfig) -> list[str | list[int]]:
        """Return each prompt as text or token ids. Raises InvalidRequestError."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise invalid_field("prompt", "is empty")
        if _are_token_ids(self.prompt):
            return [self.prompt]
        num_choices = len(self.prompt) * (self.n or 1)
        if num_choices > config.max_sequences:
            raise invalid_field(
                "prompt", f"asks for {num_choices} choices, the most is {config.max_sequences}"
            )
        is_texts = all(type(prompt) is str for prompt in self.prompt)
        is_ids = all(type(p) is list and _are_token_ids(p) for p in self.prompt)
        if not is_texts and not is_ids:
            raise InvalidRequestError(PROMPT_FORMS.format("prompt"), param="prompt")
        return self.prompt

    def check(self, config: FrontendConfig, ignored: Ignored) -> None:
        super().check(config, ignored)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise invalid_field("best_of", "other than `n` is not supported")
        if (self.logprobs or 0) > config.max_top_logprobs:
            raise invalid_field(
                "logprobs", f"is {self.logprobs}, the most is {config.max_top_logprobs}"
            )


def _are_token_ids(values: list[Any]) -> bool:
    return {*map(type, values)} == {int} and min(values) >= 0 and max(values) <= MAX_TOKEN_ID


def parse(
    kind: type[Body],
    raw: bytes,
    config: FrontendConfig,
    longest_context: int = MAX_PROMPT_TOKENS,
    ignored: Ignored | None = None,
    images_for: Callable[[str], Images | None] = lambda model: None,
) -> Body:
    """Return the checked request in `raw`. Raises InvalidRequestError naming the field.

    `longest_context` is the most tokens of a prompt that any model takes; `images_for` returns None
    for the name of a model that sees no images.
    """
    ignored = ignored or Ignored()
    fields = read_body_fields(kind, raw, _LARGE, ignored)
    check_lists(fields, config.max_sequences, longest_context)
    body = decoded(kind, raw)
    if isinstance(body, ChatRequest):
        body = body.with_tools()
    body.check(config, ignored)
    if isinstance(body, ChatRequest) and not all(map(is_text, body.messages)):
        images = images_for(body.model)
        messages = with_read_parts(
            body.messages, ignored, images, images_as_text=config.images_as_text
        )
        return msgspec.structs.replace(body, messages=messages)
    return body
