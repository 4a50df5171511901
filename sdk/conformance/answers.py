"""The rules of one whole answer."""

import math
from typing import Any

from tandem.sdk.conformance.errors import ConformanceError, Failure
from tandem.sdk.conformance.streams import Stream, Subject
from tandem.sdk.engine.types import GenerateRequest
from tandem.sdk.worker.token_requests import finish_reason

_USAGE_KEYS = ("prompt_tokens", "completion_tokens", "total_tokens")


async def whole_answer(subject: Subject, stream: Stream) -> None:
    """Wait for the whole answer to a plain request. Raise ConformanceError."""
    chunks = await stream.whole(subject.settings.generate_timeout_s)
    check_answer(chunks, stream.request, is_text=subject.is_text, is_prefill=subject.is_prefill)
    reason = check_finish_reason(chunks[-1]["finish_reason"])
    if reason in ("error", "cancelled"):
        raise ConformanceError(
            Failure.GenerateFailed, f"the answer to a plain request ended as {reason!r}"
        )


def check_answer(
    chunks: list[dict[str, Any]], request: GenerateRequest, *, is_text: bool, is_prefill: bool
) -> None:
    """Raise the ConformanceError of the first rule that the answer breaks."""
    if not chunks:
        raise ConformanceError(Failure.NoChunksYielded, "generate() ended without a chunk")
    for number, chunk in enumerate(chunks):
        _check_shape(chunk, number, is_text=is_text)
    terminal = [number for number, chunk in enumerate(chunks) if chunk.get("finish_reason")]
    if not terminal:
        raise ConformanceError(
            Failure.NoTerminalChunk, f"none of the {len(chunks)} chunks has a finish_reason"
        )
    if terminal[0] != len(chunks) - 1:
        raise ConformanceError(
            Failure.ChunkAfterTerminal,
            f"chunk {terminal[0]} of {len(chunks)} has finish_reason "
            f"{chunks[terminal[0]]['finish_reason']!r}, and more follow",
        )
    last = chunks[-1]
    check_finish_reason(last["finish_reason"])
    _check_usage(chunks, request, is_text=is_text)
    if is_prefill and not last.get("disaggregated_params"):
        raise ConformanceError(
            Failure.PrefillParamsMissing, f"the last chunk has only {', '.join(sorted(last))}"
        )


def check_finish_reason(reason: object) -> str:
    """Return the reason under Tandem's own name. Raise UnknownFinishReason."""
    try:
        return finish_reason(reason)
    except ValueError as error:
        raise ConformanceError(Failure.UnknownFinishReason, str(error)) from error


def check_logprobs(chunks: list[dict[str, Any]]) -> None:
    """Raise LogprobsMisaligned when logprobs do not match the tokens of a chunk."""
    for number, chunk in enumerate(chunks):
        num_tokens = len(chunk.get("token_ids") or [])
        for key in ("log_probs", "top_logprobs"):
            entries = chunk.get(key)
            if entries is not None and len(entries) != num_tokens:
                raise ConformanceError(
                    Failure.LogprobsMisaligned,
                    f"chunk {number} has {num_tokens} token ids and {len(entries)} {key}",
                )
        if chunk.get("top_logprobs") and not chunk.get("log_probs"):
            raise ConformanceError(
                Failure.LogprobsMisaligned, f"chunk {number} has top_logprobs without log_probs"
            )
        for logprob in chunk.get("log_probs") or []:
            if not isinstance(logprob, int | float) or math.isnan(logprob) or logprob > 0:
                raise ConformanceError(
                    Failure.LogprobsMisaligned,
                    f"chunk {number} has the log probability {logprob!r}; it must be at most 0",
                )


def _check_shape(chunk: object, number: int, *, is_text: bool) -> None:
    if not isinstance(chunk, dict):
        raise ConformanceError(
            Failure.MalformedChunk, f"chunk {number} is a {type(chunk).__name__}, not a dict"
        )
    if is_text:
        if not isinstance(chunk.get("text", ""), str):
            raise ConformanceError(
                Failure.MalformedChunk, f"chunk {number} has the text {chunk['text']!r}"
            )
        return
    if "token_ids" not in chunk:
        raise ConformanceError(Failure.MalformedChunk, f"chunk {number} has no token_ids")
    token_ids = chunk["token_ids"]
    if not isinstance(token_ids, list) or not all(_is_count(token) for token in token_ids):
        raise ConformanceError(
            Failure.MalformedChunk, f"chunk {number} has the token_ids {token_ids!r}"
        )
    if not _is_count(chunk.get("index")):
        raise ConformanceError(
            Failure.MalformedChunk, f"chunk {number} has the index {chunk.get('index')!r}"
        )


def _check_usage(chunks: list[dict[str, Any]], request: GenerateRequest, *, is_text: bool) -> None:
    usage = chunks[-1].get("completion_usage")
    if not isinstance(usage, dict):
        raise ConformanceError(
            Failure.TerminalMissingUsage, f"completion_usage of the last chunk is {usage!r}"
        )
    for key in _USAGE_KEYS:
        if not _is_count(usage.get(key)):
            raise ConformanceError(
                Failure.TerminalMissingUsage, f"completion_usage.{key} is {usage.get(key)!r}"
            )
    prompt, completion, total = (usage[key] for key in _USAGE_KEYS)
    if total != prompt + completion:
        raise ConformanceError(
            Failure.UsageDoesNotAddUp, f"{prompt} + {completion} tokens are not {total}"
        )
    max_tokens = request.get("stop_conditions", {}).get("max_tokens")
    if max_tokens is not None and completion > max_tokens:
        raise ConformanceError(
            Failure.MaxTokensExceeded, f"max_tokens was {max_tokens}, the usage says {completion}"
        )
    if is_text:
        return
    num_prompt = len(request["token_ids"])
    if prompt != num_prompt:
        raise ConformanceError(
            Failure.UsageDoesNotAddUp,
            f"the prompt has {num_prompt} tokens, the usage says {prompt}",
        )
    num_yielded = sum(len(chunk["token_ids"]) for chunk in chunks)
    if completion != num_yielded:
        raise ConformanceError(
            Failure.UsageDoesNotAddUp,
            f"{num_yielded} tokens were yielded, the usage says {completion}",
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
