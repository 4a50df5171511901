"""OpenAI's response objects for chat, completions and the list of models."""

import time
from typing import Literal

import msgspec

from tandem.frontend.chat.logprobs import ChatLogprobs, CompletionLogprobs
from tandem.runtime.wire.messages import FinishReason, PrefillPlace

ChoiceFinishReason = FinishReason | Literal["tool_calls", "function_call"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """`cached_tokens` were found in a prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class FunctionCall(msgspec.Struct, frozen=True):
    """A function and its arguments, which are JSON as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call of a whole answer."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class FunctionChunk(msgspec.Struct, frozen=True):
    """A part of a function call; the name is in the first part only."""

    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallChunk(msgspec.Struct, frozen=True):
    """A part of a tool call in a stream; id and type are in the first part only."""

    index: int
    function: FunctionChunk
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET


class ChatMessageOut(msgspec.Struct, frozen=True):
    """The assistant's answer; `content` is null beside tool calls that came without any."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    function_call: FunctionCall | msgspec.UnsetType = msgspec.UNSET  # where there are no tools


class PromptLogprob(msgspec.Struct, frozen=True):
    """One token at a position of a prompt; `rank` is null where it is not known."""

    logprob: float
    rank: int | None
    decoded_token: str


# Of each token of a prompt: itself and the likeliest ones, by token id. The first one has none.
PromptTokens = list[dict[str, PromptLogprob] | None] | msgspec.UnsetType

TokenIds = list[int] | msgspec.UnsetType  # where the request asks for them


class ChoiceTimeline(msgspec.Struct, frozen=True):
    """The making of a choice: stages in milliseconds since its decode worker received it."""

    prefill: PrefillPlace
    timeline_ms: dict[str, float]
    predicted_ms: float | msgspec.UnsetType = msgspec.UNSET  # of its `first_token`, where known


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer of a chat."""

    index: int
    message: ChatMessageOut
    logprobs: ChatLogprobs | None
    finish_reason: ChoiceFinishReason
    tandem: ChoiceTimeline | msgspec.UnsetType = msgspec.UNSET
    token_ids: TokenIds = msgspec.UNSET


class CompletionChoice(msgspec.Struct, frozen=True):
    """One completion of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: ChoiceFinishReason
    tandem: ChoiceTimeline | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptTokens = msgspec.UNSET
    token_ids: TokenIds = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET


class WholeResponse(msgspec.Struct, frozen=True):
    """A response that is not streamed, of chat or completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice | CompletionChoice]
    usage: Usage
    object: Literal["chat.completion", "text_completion"]
    prompt_logprobs: PromptTokens = msgspec.UNSET  # of a chat
    prompt_token_ids: TokenIds = msgspec.UNSET  # of a chat


class ModelObject(msgspec.Struct, frozen=True):
    """A served model; `max_model_len` is its context in tokens, where that is known."""

    id: str
    created: int
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET
    object: Literal["model"] = "model"
    owned_by: str = "tandem"


class ModelList(msgspec.Struct, frozen=True):
    """All served models."""

    data: list[ModelObject]
    object: Literal["list"] = "list"


class ResponseHead(msgspec.Struct, frozen=True):
    """The part that a whole response and every chunk of a stream have in common."""

    response_id: str
    created_s: int  # unix seconds
    model: str
    is_chat: bool
    with_usage: bool  # every chunk has a `usage`, null but in the last
    calls_functions: bool = False  # in place of tools


def new_head(
    request_id: str,
    model: str,
    is_chat: bool,
    with_usage: bool,
    *,
    calls_functions: bool = False,
) -> ResponseHead:
    """Return the head of a response that is created now."""
    id, now_s = f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}", int(time.time())
    return ResponseHead(id, now_s, model, is_chat, with_usage, calls_functions)


def usage(num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int) -> Usage:
    """Return the counts of a response, over all its prompts and choices."""
    return Usage(
        num_prompt_tokens,
        num_completion_tokens,
        num_prompt_tokens + num_completion_tokens,
        PromptTokensDetails(num_cached_tokens),
    )


def finish_reason_of(
    reason: FinishReason, has_whole_calls: bool, *, calls_functions: bool = False
) -> ChoiceFinishReason:
    """Return OpenAI's finish reason: a choice that ended of itself may have called tools."""
    if not has_whole_calls or reason != "stop":
        return reason
    return "function_call" if calls_functions else "tool_calls"
