"""The bodies of OpenAI's chat and completions requests, checked field by field.

Types are strict, as they are at OpenAI: a number in a string is refused. A field that is not
supported is refused by name (see `outline`), unless it is null or can be ignored safely.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tandem.frontend.config import FrontendConfig
from tandem.frontend.openai.constraints import (
    ConstraintFields,
    JsonSchema,
    ResponseFormat,
    StructuredOutputs,
)
from tandem.frontend.openai.messages import (
    CalledFunction,
    ChatMessage,
    ContentPart,
    MessageToolCall,
    TemplateMessage,
)
from tandem.frontend.openai.outline import MAX_PROMPT_TOKENS, PROMPT_FORMS, check_outline
from tandem.frontend.openai.tools import (
    Function,
    FunctionName,
    NamedTool,
    Tool,
    ToolChoice,
    check_tools,
)
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.printable import short
from tandem.runtime.request_bounds import LARGEST_INT, LEAST_REPETITION_PENALTY

Body = TypeVar("Body", bound="RequestBody")
MAX_TOKEN_ID = 2**32 - 1
_MAX_I64 = 2**63 - 1
_MAX_LOGIT_BIAS = 100
_MAX_DOCUMENTS = 256
_MAX_TOKEN_LIST = 1024  # entries of logit_bias and of stop_token_ids
Count = Annotated[int, Field(ge=1, le=LARGEST_INT)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


class StreamOptions(BaseModel):
    """`include_usage` adds a last chunk with the token counts; the other, counts in every chunk."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis; none is added


class RequestBody(ConstraintFields):
    """The fields that chat and completions have in common."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=_MAX_TOKEN_LIST)] | None = None
    seed: Annotated[int, Field(ge=-_MAX_I64 - 1, le=_MAX_I64)] | None = None

    # Beyond OpenAI, under the names that other servers of open models use.
    top_k: Annotated[int, Field(ge=-1, le=LARGEST_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=LEAST_REPETITION_PENALTY, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=LARGEST_INT)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: (
        Annotated[list[TokenId], Field(fail_fast=True, max_length=_MAX_TOKEN_LIST)] | None
    ) = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=LARGEST_INT)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=LARGEST_INT)] | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    # Accepted without effect, because official clients send them.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    spaces_between_special_tokens: bool | None = None  # of tokenizers that are not fast ones
    use_beam_search: Literal[False] | None = None
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = None  # of beam search
    priority: Literal[0] | None = None

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings, as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def token_biases(self) -> dict[int, float]:
        """`logit_bias` by token id. Raises InvalidRequestError for a wrong key or value."""
        biases: dict[int, float] = {}
        for key, value in (self.logit_bias or {}).items():
            is_number = type(value) in (int, float)
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise InvalidRequestError(
                    f"`logit_bias` has the key {key[:32]!r}, which is not a token id",
                    param="logit_bias",
                )
            if not is_number or not -_MAX_LOGIT_BIAS <= value <= _MAX_LOGIT_BIAS:
                raise InvalidRequestError(
                    f"`logit_bias` of token {key} must be a number from -{_MAX_LOGIT_BIAS} to "
                    f"{_MAX_LOGIT_BIAS}",
                    param="logit_bias",
                )
            biases[int(key)] = float(value)
        return biases

    @property
    def include_usage(self) -> bool:
        """True when the stream ends with a usage chunk."""
        return bool(self.stream and self.stream_options and self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        """True when every chunk of the stream has the token counts so far."""
        options = self.stream_options
        return self.include_usage and bool(options and options.continuous_usage_stats)

    def check(self, config: FrontendConfig) -> None:
        """Raise InvalidRequestError for values that the types allow and the frontend does not."""
        if (self.n or 1) > config.max_n:
            raise InvalidRequestError(f"`n` is {self.n}, the most is {config.max_n}", param="n")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "`stream_options` is only allowed when `stream` is true", param="stream_options"
            )
        if self.stream_options and self.stream_options.continuous_usage_stats:
            self._check_continuous_usage()
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "`truncate_prompt_tokens` must be -1, or 1 and more", param="truncate_prompt_tokens"
            )
        self._check_prompt_logprobs(config)
        self._check_stop(config)

    def _check_continuous_usage(self) -> None:
        if not self.include_usage:
            raise InvalidRequestError(
                "`stream_options.continuous_usage_stats` needs `include_usage`",
                param="stream_options.continuous_usage_stats",
            )

    def _check_prompt_logprobs(self, config: FrontendConfig) -> None:
        if self.prompt_logprobs is None:
            return
        if self.stream:
            raise InvalidRequestError(
                "`prompt_logprobs` is only allowed when `stream` is false", param="prompt_logprobs"
            )
        if self.prompt_logprobs > config.max_top_logprobs:
            raise InvalidRequestError(
                f"`prompt_logprobs` is {self.prompt_logprobs}, the most is "
                f"{config.max_top_logprobs}",
                param="prompt_logprobs",
            )

    def _check_stop(self, config: FrontendConfig) -> None:
        if len(self.stop_strings) > config.max_stop_strings:
            raise InvalidRequestError(
                f"`stop` has {len(self.stop_strings)} strings, the most is "
                f"{config.max_stop_strings}",
                param="stop",
            )
        if "" in self.stop_strings:
            raise InvalidRequestError("`stop` must not have an empty string", param="stop")


class ChatRequest(RequestBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=LARGEST_INT)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: Literal[False] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=_MAX_DOCUMENTS)] | None = None

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
    def usable_tools(self) -> list[Tool]:
        """The tools that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    def conversation(self) -> list[TemplateMessage]:
        """Return the messages for a chat template. Raises InvalidRequestError naming a field."""
        return [
            message.for_template(f"messages[{index}]")
            for index, message in enumerate(self.messages)
        ]

    def template_variables(self) -> dict[str, Any]:
        """Return the variables of the chat template beside the messages.

        `chat_template_kwargs` take precedence over those that other fields stand for. Templates
        know the switch of reasoning under two names.
        """
        variables: dict[str, Any] = {}
        if self.usable_tools:
            tools = [tool.model_dump(exclude_none=True) for tool in self.usable_tools]
            variables["tools"] = tools
        if self.documents is not None:
            variables["documents"] = self.documents
        if self.reasoning_effort is not None:
            thinks = self.reasoning_effort != "none"
            variables["enable_thinking"] = variables["thinking"] = thinks
            if thinks:
                variables["reasoning_effort"] = self.reasoning_effort
        return variables | (self.chat_template_kwargs or {})

    def check(self, config: FrontendConfig) -> None:
        super().check(config)
        self._check_continuation()
        check_tools(self.tools or [], self.tool_choice)
        if (self.top_logprobs or 0) > config.max_top_logprobs:
            raise InvalidRequestError(
                f"`top_logprobs` is {self.top_logprobs}, the most is {config.max_top_logprobs}",
                param="top_logprobs",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                "`top_logprobs` is only allowed when `logprobs` is true", param="top_logprobs"
            )

    def _check_continuation(self) -> None:
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            raise InvalidRequestError(
                "`continue_final_message` and `add_generation_prompt` exclude each other",
                param="continue_final_message",
            )
        if self.messages[-1].role != "assistant":
            raise InvalidRequestError(
                "`continue_final_message` needs a last message of the assistant",
                param="continue_final_message",
            )


class CompletionRequest(RequestBody):
    """POST /v1/completions."""

    prompt: str | list[Any]
    max_tokens: Annotated[int, Field(ge=0, le=LARGEST_INT)] | None = None  # 0: the prompt alone
    best_of: Count | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=LARGEST_INT)] | None = None

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
            raise InvalidRequestError("`prompt` is empty", param="prompt")
        if _are_token_ids(self.prompt):
            return [self.prompt]
        num_choices = len(self.prompt) * (self.n or 1)
        if num_choices > config.max_sequences:
            raise InvalidRequestError(
                f"`prompt` asks for {num_choices} choices, the most is {config.max_sequences}",
                param="prompt",
            )
        is_texts = all(type(prompt) is str for prompt in self.prompt)
        is_ids = all(type(p) is list and p and _are_token_ids(p) for p in self.prompt)
        if not is_texts and not is_ids:
            raise InvalidRequestError(PROMPT_FORMS, param="prompt")
        return self.prompt

    def check(self, config: FrontendConfig) -> None:
        super().check(config)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequestError("`best_of` other than `n` is not supported", param="best_of")
        if (self.logprobs or 0) > config.max_top_logprobs:
            raise InvalidRequestError(
                f"`logprobs` is {self.logprobs}, the most is {config.max_top_logprobs}",
                param="logprobs",
            )


def _are_token_ids(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value <= MAX_TOKEN_ID for value in values)


_KNOWN: dict[type[RequestBody], frozenset[str]] = {
    kind: frozenset(kind.model_fields) for kind in (ChatRequest, CompletionRequest)
}
_KNOWN_OF_MESSAGE = frozenset(ChatMessage.model_fields)


def parse(
    kind: type[Body],
    raw: bytes,
    config: FrontendConfig,
    longest_context: int = MAX_PROMPT_TOKENS,
) -> Body:
    """Return the checked request in `raw`. Raises InvalidRequestError naming the field.

    `longest_context` is the most tokens of a prompt that any model takes.
    """
    check_outline(raw, _KNOWN[kind], _KNOWN_OF_MESSAGE, config.max_sequences, longest_context)
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        raise _translate(error) from error
    body.check(config)
    return body


# Pydantic puts branches of unions into its locations. A message has the names of fields only.
_FIELDS = frozenset(
    name
    for model in (
        ChatRequest,
        CompletionRequest,
        ChatMessage,
        ContentPart,
        MessageToolCall,
        CalledFunction,
        Tool,
        Function,
        NamedTool,
        FunctionName,
        ResponseFormat,
        JsonSchema,
        StructuredOutputs,
    )
    for name in model.model_fields
) | {"include_usage", "continuous_usage_stats", "schema", "json"}


def _translate(error: ValidationError) -> InvalidRequestError:
    errors = error.errors(include_url=False, include_context=False)
    first = max(
        errors, key=lambda each: len(each["loc"])
    )  # the deepest location is in the branch that was meant
    if first["type"] == "json_invalid":
        return InvalidRequestError(f"the body is not JSON: {first['msg']}")
    where = ""
    for part in first["loc"]:
        if isinstance(part, int):
            where += f"[{part}]"
        elif part in _FIELDS:
            where += f".{part}" if where else part
    if not where:
        return InvalidRequestError("the body must be a JSON object")
    if first["type"] == "extra_forbidden":
        field = f"{where}.{short(str(first['loc'][-1]))}"
        return InvalidRequestError(f"`{field}` is not supported", param=field)
    is_field = not where.endswith("]")
    if first["type"] == "missing" or (first["input"] is None and is_field):
        return InvalidRequestError(f"`{where}` is required", param=where)
    return InvalidRequestError(f"`{where}`: {first['msg']}", param=where)
