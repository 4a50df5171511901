"""Between the kit's requests and vLLM's sampling parameters and outputs; pure, without vLLM."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tandem.sdk.engine.types import CompletionUsage, GenerateChunk, GenerateRequest
from tandem.sdk.exceptions import InvalidArgument

_PASSED_ON = (
    "temperature", "top_p", "top_k", "min_p",
    "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
# The kit's kind of a grammar |-> the field of vLLM's StructuredOutputsParams.
_GRAMMAR_FIELDS = {
    "json_schema": "json",
    "regex": "regex",
    "lark": "grammar",
    "gbnf": "grammar",
    "structural_tag": "structural_tag",
}


class Logprob(Protocol):
    """vLLM's log probability of one token."""

    logprob: float


class Completion(Protocol):
    """The new tokens of one of vLLM's steps."""

    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Logprob]] | None
    finish_reason: str | None


def sampling_fields(request: GenerateRequest) -> dict[str, Any]:
    """Return the fields of vLLM's SamplingParams, all but `output_kind` and `structured_outputs`.

    The limits of a resumed answer are those of the tokens that remain.
    """
    sampling = request.get("sampling_options") or {}
    stop = request.get("stop_conditions") or {}
    fields = {name: sampling[name] for name in _PASSED_ON if sampling.get(name) is not None}
    return fields | {
        "seed": sampling.get("seed"),
        "logit_bias": sampling.get("logit_bias") or None,
        "allowed_token_ids": sampling.get("allowed_token_ids") or None,
        "max_tokens": stop.get("max_tokens"),
        "min_tokens": stop.get("min_tokens") or 0,
        "stop_token_ids": stop.get("stop_token_ids") or None,
        "ignore_eos": bool(stop.get("ignore_eos")),
        "logprobs": (request.get("output_options") or {}).get("logprobs"),
        "detokenize": False,
    }


def bad_words(request: GenerateRequest) -> list[list[int]] | None:
    """Return the tokens of each word that the answer may not have; None for no words."""
    return (request.get("sampling_options") or {}).get("bad_words") or None


def grammar_fields(request: GenerateRequest) -> dict[str, str] | None:
    """Return the fields of vLLM's StructuredOutputsParams; None for an answer without a grammar.

    Raise InvalidArgument for a resumed answer: vLLM begins a grammar at the end of the prompt.
    """
    grammar = (request.get("sampling_options") or {}).get("grammar")
    if grammar is None:
        return None
    if (request.get("extra_args") or {}).get("num_generated"):
        raise InvalidArgument(
            "vLLM cannot resume an answer with a grammar that another worker has begun; send the "
            "request again",
            param="grammar",
        )
    return {_GRAMMAR_FIELDS[grammar["kind"]]: grammar["source"]}


def chunk_of(completion: Completion, num_prompt: int, num_before: int) -> GenerateChunk:
    """Return a step's tokens as a chunk; `num_before` tokens of the answer came before it.

    vLLM's answer ends with the token that stopped it. A chunk has that token as `stop_reason`.
    """
    token_ids = list(completion.token_ids)
    is_stopped = completion.finish_reason == "stop"
    stop_token_id = token_ids.pop() if is_stopped and token_ids else None
    chunk: GenerateChunk = {"token_ids": token_ids, "index": 0}
    if completion.logprobs is not None:
        rows = list(zip(token_ids, completion.logprobs[: len(token_ids)], strict=True))
        chunk["log_probs"] = [row[token_id].logprob for token_id, row in rows]
        chunk["top_logprobs"] = [_best_first(row) for _, row in rows]
    if completion.finish_reason is not None:
        chunk["finish_reason"] = completion.finish_reason
        chunk["completion_usage"] = _usage(num_prompt, num_before + len(token_ids))
    if stop_token_id is not None:
        chunk["stop_reason"] = stop_token_id
    return chunk


def cancelled(num_prompt: int, num_tokens: int) -> GenerateChunk:
    """Return the last chunk of an answer whose caller has left after `num_tokens` tokens."""
    usage = _usage(num_prompt, num_tokens)
    return {
        "token_ids": [], "index": 0, "finish_reason": "cancelled", "completion_usage": usage,
    }  # fmt: skip


def _usage(num_prompt: int, num_tokens: int) -> CompletionUsage:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
    }


def _best_first(row: Mapping[int, Logprob]) -> list[dict[str, Any]]:
    ranked = sorted(row.items(), key=lambda item: -item[1].logprob)
    return [
        {"rank": rank, "token_id": token_id, "logprob": each.logprob}
        for rank, (token_id, each) in enumerate(ranked, 1)
    ]
