"""What the frontend answers: OpenAI's objects, and errors in OpenAI's shape."""

import logging
from typing import Literal

import msgspec

from tandem.frontend.tokens.detokenizer import DetokenizerFactory
from tandem.runtime.address import new_id
from tandem.runtime.errors import (
    CapacityError,
    ConnectionLostError,
    ContextLengthError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ProtocolError,
    TandemError,
)
from tandem.runtime.messages import FinishReason, PrefillPlace, TokenLogprobs

logger = logging.getLogger(__name__)


class BodyTooLargeError(TandemError):
    """The request's body is over the limit."""

    code = "body_too_large"
    status = 413


class BodyTimeoutError(TandemError):
    """The request's body did not arrive in time."""

    code = "body_timeout"
    status = 408


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """`cached_tokens` were found in a prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A generated token of a chat choice."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a chat choice."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a completion choice; offsets are in characters of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]] | None


class ChatMessageOut(msgspec.Struct, frozen=True):
    """The assistant's answer."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChoiceCourse(msgspec.Struct, frozen=True):
    """How a choice was made, for those who ask; stages in ms since its decode worker had it."""

    prefill: PrefillPlace
    timeline_ms: dict[str, float]


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer of a chat."""

    index: int
    message: ChatMessageOut
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    tandem: ChoiceCourse | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct, frozen=True):
    """One completion of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    tandem: ChoiceCourse | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """The whole answer of a chat that is not streamed."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class Completion(msgspec.Struct, frozen=True):
    """The whole answer of completions that are not streamed."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    object: Literal["text_completion"] = "text_completion"


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


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong, for programs (`code`, `param`) and for people (`message`)."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error shape."""

    error: ErrorDetail


def usage(num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int) -> Usage:
    """The counts of a response, all its prompts and choices together."""
    return Usage(
        num_prompt_tokens,
        num_completion_tokens,
        num_prompt_tokens + num_completion_tokens,
        PromptTokensDetails(num_cached_tokens),
    )


def chat_logprobs(
    texts: DetokenizerFactory, token_ids: list[int], logprobs: list[TokenLogprobs]
) -> ChatLogprobs:
    """The tokens of a chat choice with their log probabilities."""
    content = []
    for token_id, token in zip(token_ids, logprobs, strict=True):
        top = [TopLogprob(*_split(texts, other, value)) for other, value in token.top]
        content.append(TokenLogprob(*_split(texts, token_id, token.logprob), top))
    return ChatLogprobs(content)


def _split(
    texts: DetokenizerFactory, token_id: int, logprob: float
) -> tuple[str, float, list[int]]:
    text, data = texts.token_text(token_id)
    return text, _finite(logprob), data


def completion_logprobs(
    texts: DetokenizerFactory,
    token_ids: list[int],
    logprobs: list[TokenLogprobs],
    text_offset: int,
) -> CompletionLogprobs:
    """The tokens of a completion choice; the first begins at `text_offset`."""
    tokens = [texts.token_text(token_id)[0] for token_id in token_ids]
    offsets = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    top = [
        {texts.token_text(other)[0]: _finite(value) for other, value in token.top}
        for token in logprobs
    ]
    return CompletionLogprobs(
        offsets, [_finite(token.logprob) for token in logprobs], tokens, top if any(top) else None
    )


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token that cannot be drawn."""
    return max(logprob, -9999.0)


def error_body(error: TandemError) -> bytes:
    """The JSON of an error, as it is: `public_error` decides what a caller may see."""
    return _encode(ErrorBody(_detail(error)))


def _detail(error: TandemError) -> ErrorDetail:
    if isinstance(error, ContextLengthError):
        return ErrorDetail(
            error.message, "invalid_request_error", error.param, "context_length_exceeded"
        )
    if isinstance(
        error, InvalidRequestError | NotFoundError | BodyTooLargeError | BodyTimeoutError
    ):
        is_model = isinstance(error, NotFoundError) and error.param == "model"
        code = "model_not_found" if is_model else error.code
        return ErrorDetail(error.message, "invalid_request_error", error.param, code)
    kind = "overloaded_error" if isinstance(error, OverloadedError) else "server_error"
    return ErrorDetail(error.message, kind, error.param, error.code)


def public_error(error: Exception, request_id: str) -> TandemError:
    """What the caller may see of an error; the rest goes to the log under an error id."""
    if isinstance(error, NotFoundError) and error.param is None:
        return _opaque(InternalError, "internal error", error, request_id)
    if isinstance(error, _SHOWN):
        return error
    if isinstance(error, DeadlineError):
        return DeadlineError("the request's time is up")
    if isinstance(error, ConnectionLostError | ProtocolError):
        return _opaque(type(error), "the decode worker of this request was lost", error, request_id)
    return _opaque(InternalError, "internal error", error, request_id)


def _opaque(
    kind: type[TandemError], message: str, error: Exception, request_id: str
) -> TandemError:
    error_id = new_id()
    trace = None if isinstance(error, TandemError) else error
    logger.error("request %s, error id %s: %s", request_id, error_id, error, exc_info=trace)
    return kind(f"{message} (error id {error_id})")


# Errors about the caller's own request; a CapacityError says what would have been needed.
_SHOWN = (
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    BodyTooLargeError,
    BodyTimeoutError,
    CapacityError,
)
_encode = msgspec.json.Encoder().encode
