"""The rules of one whole answer."""

import math
from typing import Any

from tandem.sdk.conformance.errors import Failure
from tandem.sdk.conformance.streams import Stream, Subject
from tandem.sdk.engine.types import GenerateRequest
from tandem.sdk.wire.token_requests import finish_reason

_USAGE_KEYS = ("prompt_tokens", "completion_tokens", "total_tokens")


async def whole_answer(subject: Subject, stream: Stream) -> None:
    """Wait for the whole answer to a plain request. Raise ConformanceError."""
    chunks = await stream.whole(subject.settings.generate_timeout_s)
    check_answer(chunks, stream.request, is_text=subject.is_text, is_prefill=subject.is_prefill)
    reason = check_finish_reason(chunks[-1]["finish_reason"])
    if reason in ("error", "cancelled"):
        raise Failure.GenerateFailed.error(f"the answer to a plain request ended as {reason!r}")


def check_answer(
    chunks: list[dict[str, Any]], request: GenerateRequest, *, is_text: bool, is_prefill: bool
) -> None:
    """Raise the ConformanceError of the first rule that the answer breaks."""
    if not chunks:
        raise Failure.NoChunksYielded.error("generate() ended without a chunk")
    for number, chunk in enumerate(chunks):
        if flaw := _flaw_of_shape(chunk, is_text=is_text):
            raise Failure.MalformedChunk.error(f"chunk {number} {flaw}")
    terminal = [number for number, chunk in enumerate(chunks) if chunk.get("finish_reason")]
    if not terminal:
        raise Failure.NoTerminalChunk.error(f"none of the {len(chunks)} chunks has a finish_reason")
    if terminal[0] != len(chunks) - 1:
        raise Failure.ChunkAfterTerminal.error(
            f"chunk {terminal[0]} of {len(chunks)} has finish_reason "
            f"{chunks[terminal[0]]['finish_reason']!r}, and more follow"
        )
    last = chunks[-1]
    check_finish_reason(last["finish_reason"])
    _check_usage(chunks, request, is_text=is_text)
    if is_prefill and not last.get("disaggregated_params"):
        raise Failure.PrefillParamsMissing.error(
            f"the last chunk has only {', '.join(sorted(last))}"
        )


def check_finish_reason(reason: object) -> str:
    """Return the reason under Tandem's own name. Raise UnknownFinishReason."""
    try:
        return finish_reason(reason)
    except ValueError as error:
        raise Failure.UnknownFinishReason.error(str(error)) from error


def check_logprobs(chunks: list[dict[str, Any]]) -> None:
    """Raise LogprobsMisaligned when logprobs do not match the tokens of a chunk."""
    for number, chunk in enumerate(chunks):
        if flaw := _flaw_of_logprobs(chunk):
            raise Failure.LogprobsMisaligned.error(f"chunk {number} has {flaw}")


def _flaw_of_logprobs(chunk: dict[str, Any]) -> str:
    num_tokens = len(chunk.get("token_ids") or [])
    for key in ("log_probs", "top_logprobs"):
        entries = chunk.get(key)
        if entries is not None and len(entries) != num_tokens:
            return f"{num_tokens} token ids and {len(entries)} {key}"
    if chunk.get("top_logprobs") and not chunk.get("log_probs"):
        return "top_logprobs without log_probs"
    for logprob in chunk.get("log_probs") or []:
        if not isinstance(logprob, int | float) or math.isnan(logprob) or logprob > 0:
            return f"the log probability {logprob!r}; it must be at most 0"
    return ""


def _flaw_of_shape(chunk: object, *, is_text: bool) -> str:
    if not isinstance(chunk, dict):
        return f"is a {type(chunk).__name__}, not a dict"
    if is_text:
        is_str = isinstance(chunk.get("text", ""), str)
        return "" if is_str else f"has the text {chunk['text']!r}"
    if "token_ids" not in chunk:
        return "has no token_ids"
    token_ids = chunk["token_ids"]
    if not isinstance(token_ids, list) or not all(_is_count(token) for token in token_ids):
        return f"has the token_ids {token_ids!r}"
    if not _is_count(chunk.get("index")):
        return f"has the index {chunk.get('index')!r}"
    return ""


def _check_usage(chunks: list[dict[str, Any]], request: GenerateRequest, *, is_text: bool) -> None:
    usage = chunks[-1].get("completion_usage")
    if not isinstance(usage, dict):
        raise Failure.TerminalMissingUsage.error(f"completion_usage of the last chunk is {usage!r}")
    for key in _USAGE_KEYS:
        if not _is_count(usage.get(key)):
            raise Failure.TerminalMissingUsage.error(
                f"completion_usage.{key} is {usage.get(key)!r}"
            )
    prompt, completion, total = (usage[key] for key in _USAGE_KEYS)
    if total != prompt + completion:
        raise Failure.UsageDoesNotAddUp.error(f"{prompt} + {completion} tokens are not {total}")
    max_tokens = request.get("stop_conditions", {}).get("max_tokens")
    if max_tokens is not None and completion > max_tokens:
        raise Failure.MaxTokensExceeded.error(
            f"max_tokens was {max_tokens}, the usage says {completion}"
        )
    if is_text:
        return
    num_prompt = len(request["token_ids"])
    if prompt != num_prompt:
        raise Failure.UsageDoesNotAddUp.error(
            f"the prompt has {num_prompt} tokens, the usage says {prompt}"
        )
    num_yielded = sum(len(chunk["token_ids"]) for chunk in chunks)
    if completion != num_yielded:
        raise Failure.UsageDoesNotAddUp.error(
            f"{num_yielded} tokens were yielded, the usage says {completion}"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
