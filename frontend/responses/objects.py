"""The Responses API's objects: a response, its items and their parts."""

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tandem.frontend.generation.piece_writer import Ending
from tandem.frontend.parsers.pieces import TokenLogprob
from tandem.frontend.responses.items import Status
from tandem.frontend.responses.requests import Format, ResponsesRequest
from tandem.frontend.responses.tools import Tool, ToolChoice, Tools
from tandem.runtime.wire.sampling_defaults import SamplingDefaults


class OutputText(msgspec.Struct, frozen=True):
    """The text of a message."""

    text: str
    annotations: list[str] = []
    logprobs: list[TokenLogprob] = []
    type: Literal["output_text"] = "output_text"


class ReasoningText(msgspec.Struct, frozen=True):
    """The text of a reasoning item."""

    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


class OutputMessage(msgspec.Struct, frozen=True):
    """A message of an answer."""

    id: str
    content: list[OutputText]
    status: Status
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"


class OutputReasoning(msgspec.Struct, frozen=True):
    """The reasoning of an answer."""

    id: str
    content: list[ReasoningText]
    status: Status
    encrypted_content: str | UnsetType = UNSET
    summary: list[str] = []
    type: Literal["reasoning"] = "reasoning"


class OutputCall(msgspec.Struct, frozen=True):
    """A function call of an answer."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Status
    namespace: str | UnsetType = UNSET
    type: Literal["function_call"] = "function_call"


class OutputInput(msgspec.Struct, frozen=True):
    """A call of a custom tool in an answer."""

    id: str
    call_id: str
    name: str
    input: str
    status: Status
    namespace: str | UnsetType = UNSET
    type: Literal["custom_tool_call"] = "custom_tool_call"


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputInput


class ResponseError(msgspec.Struct, frozen=True):
    """The error of a response that failed."""

    code: str
    message: str


class CachedTokens(msgspec.Struct, frozen=True):
    """Tokens of the prompt that were found in a prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ReasoningTokens(msgspec.Struct, frozen=True):
    """Tokens of the answer that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    """The reason of an answer without an end."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A response, and the settings of its request. Those without a value are null."""

    id: str
    created_at: int  # unix seconds
    completed_at: int | None = None  # unix seconds
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    incomplete_details: IncompleteDetails | None = None
    error: ResponseError | None = None
    model: str
    output: Sequence[OutputItem] = ()
    usage: ResponseUsage | None = None
    previous_response_id: str | None
    instructions: str | None
    tools: list[Tool]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any] | None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    max_output_tokens: int | None
    max_tool_calls: int | None
    store: bool
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    background: bool = False
    service_tier: str = "default"
    truncation: str = "disabled"
    top_logprobs: int = 0
    object: Literal["response"] = "response"


def new_response(
    request: ResponsesRequest,
    tools: Tools,
    response_id: str,
    defaults: SamplingDefaults,
    *,
    is_stored: bool,
) -> Response:
    """Return the response to a request, with its model's defaults. Nothing is generated yet."""
    text, reasoning = request.text, request.reasoning
    return Response(
        id=response_id,
        created_at=int(time.time()),
        model=request.model,
        previous_response_id=request.previous_response_id,
        instructions=request.instructions,
        tools=tools.given,
        tool_choice=tools.choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        text={"format": (text and text.format) or Format()}
        | ({"verbosity": text.verbosity} if text and text.verbosity else {}),
        reasoning=None
        if reasoning is None
        else {"effort": reasoning.effort, "summary": reasoning.summary},
        temperature=_first(request.temperature, defaults.temperature, 1.0),
        top_p=_first(request.top_p, defaults.top_p, 1.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        store=is_stored,
        metadata=request.metadata or {},
        user=request.user,
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key,
        top_logprobs=(request.top_logprobs or 0) if request.wants_logprobs else 0,
    )


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def ended(response: Response, output: list[OutputItem], ending: Ending) -> Response:
    """Return the response once everything is generated."""
    tokens, is_cut = ending.tokens, ending.reason == "length"
    usage = ResponseUsage(
        tokens.num_prompt,
        CachedTokens(tokens.num_cached),
        tokens.num_generated,
        ReasoningTokens(ending.num_reasoning),
        tokens.num_prompt + tokens.num_generated,
    )
    return msgspec.structs.replace(
        response,
        completed_at=None if is_cut else int(time.time()),
        status="incomplete" if is_cut else "completed",
        incomplete_details=IncompleteDetails() if is_cut else None,
        output=output,
        usage=usage,
    )


def failed(response: Response, output: list[OutputItem], message: str) -> Response:
    """Return the response once an error has ended it."""
    error = ResponseError("server_error", message)
    return msgspec.structs.replace(response, status="failed", error=error, output=output)
