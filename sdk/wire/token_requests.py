"""Between the wire's GenerateRequest and TokenDelta and the dicts of token models.

`serving.py` makes one TokenCodec per request.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import BaseModel

from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.bounds import LARGEST_INT
from tandem.runtime.wire.messages import (
    FinishReason,
    GenerateRequest,
    PrefillReport,
    TokenDelta,
    TokenLogprobs,
    encode,
    unpack_tokens,
)

# An engine's name of a finish reason |-> the wire's.
FINISH_REASONS: dict[str, FinishReason] = {
    **dict.fromkeys(("stop", "eos", "eos_token", "stop_sequence", "stop_token"), "stop"),
    **dict.fromkeys(("end_turn", "content_filter"), "stop"),
    **dict.fromkeys(("length", "max_tokens"), "length"),
    **dict.fromkeys(("cancelled", "canceled", "cancel", "abort", "aborted"), "cancelled"),
    "error": "error",
}

LEAST_LOGPROB = -9999.0


class TokenCodec:
    """One request of a token model: `request` is the dict that its handler gets."""

    __slots__ = ("_is_over", "_max_tokens", "_num_tokens", "_num_top_logprobs", "request")

    def __init__(self, message: GenerateRequest) -> None:
        _check_supported(message)
        self.request = request_dict(message)
        self._num_top_logprobs = message.sampling.logprobs
        self._max_tokens = message.stop.max_tokens - message.num_generated
        self._num_tokens = 0
        self._is_over = False

    def encode(self, item: Any) -> bytes:
        """Return a handler's chunk as a TokenDelta. Raise ValueError naming the key at fault."""
        chunk = _as_dict(item)
        if self._is_over:
            raise ValueError("a chunk came after the one with a `finish_reason`")
        delta = token_delta(chunk, self._num_top_logprobs)
        self._num_tokens += len(delta.token_ids)
        self._is_over = delta.finish_reason is not None
        return encode(delta)

    def end(self) -> bytes | None:
        """Return the terminal delta of a handler that returned without one."""
        if self._is_over:
            return None
        is_full = self._num_tokens >= self._max_tokens
        return encode(TokenDelta([], "length" if is_full else "stop"))


def _check_supported(message: GenerateRequest) -> None:
    """Raise InvalidRequestError for a request that the protocol of token engines cannot carry."""
    if message.sampling.prompt_logprobs:
        raise InvalidRequestError(
            "`echo` with `logprobs`: this model's engine gives no log probabilities of prompts",
            param="echo",
        )
    if message.stop.max_tokens < 1:
        raise InvalidRequestError(
            "`max_tokens` is 0: this model's engine generates at least one token",
            param="max_tokens",
        )


def request_dict(message: GenerateRequest) -> dict[str, Any]:
    """Return the request as the dict for handlers of token models.

    `token_ids` holds the prompt and, at its end, the `extra_args["num_generated"]` tokens that
    another worker has generated; the limits in `stop_conditions` are for the tokens that remain.
    """
    stop, num_generated = message.stop, message.num_generated
    sampling = msgspec.structs.asdict(message.sampling)
    logprobs, _ = sampling.pop("logprobs"), sampling.pop("prompt_logprobs")
    for name in ("allowed_token_ids", "bad_words"):
        if not sampling[name]:
            del sampling[name]
    grammar = message.grammar and msgspec.structs.asdict(message.grammar)
    extra: dict[str, Any] = {"num_generated": num_generated}
    if message.cache_salt:
        extra["cache_salt"] = message.cache_salt
    if message.prefill_place:
        extra["prefill_place"] = message.prefill_place
    images = {"images": list(message.images)} if message.images else {}
    return images | {
        "token_ids": unpack_tokens(message.token_ids),
        "model": message.model,
        "request_id": message.request_id,
        "sampling_options": {"n": 1, **sampling, "grammar": grammar},
        "stop_conditions": {
            "max_tokens": max(0, stop.max_tokens - num_generated),
            "min_tokens": max(0, stop.min_tokens - num_generated),
            "stop_token_ids": list(stop.stop_token_ids),
            "ignore_eos": stop.ignore_eos,
        },
        "output_options": {"logprobs": logprobs},
        "routing": {},
        "extra_args": extra,
    }


def token_delta(chunk: dict[str, Any], num_top_logprobs: int | None) -> TokenDelta:
    """Return a handler's chunk for the wire, with the `num_top_logprobs` that were requested.

    None is no logprobs. Raise ValueError naming the key at fault.
    """
    token_ids = _token_ids(chunk.get("token_ids"))
    if chunk.get("index"):
        raise ValueError(f"`index` is {chunk['index']!r}: a request has one sequence, number 0")
    logprobs = None
    if num_top_logprobs is not None:
        logprobs = _logprobs(chunk, len(token_ids), num_top_logprobs)
    prefill = _prefill(chunk.get("prefill"))
    num_prompt = chunk.get("num_prompt_tokens", 0)
    if type(num_prompt) is not int or not 0 <= num_prompt <= LARGEST_INT:
        raise ValueError(f"`num_prompt_tokens` is {num_prompt!r}, not a number of tokens")
    reason = chunk.get("finish_reason")
    if reason is None:
        return TokenDelta(
            token_ids, logprobs=logprobs, prefill=prefill, num_prompt_tokens=num_prompt
        )
    stop_token_id = chunk.get("stop_reason")
    if type(stop_token_id) is not int or not 0 <= stop_token_id < 2**32:
        stop_token_id = None
    elif token_ids and token_ids[-1] == stop_token_id:
        # It ended the answer and is no part of its text.
        token_ids = token_ids[:-1]
        logprobs = logprobs and logprobs[:-1]
    return TokenDelta(
        token_ids,
        finish_reason(reason),
        logprobs,
        prefill,
        stop_token_id,
        num_prompt_tokens=num_prompt,
    )


def finish_reason(reason: object) -> FinishReason:
    """Return the wire's name of an engine's reason. Raise ValueError for an unknown one."""
    name = str(getattr(reason, "value", reason)).lower()
    if name.startswith("error"):
        return "error"
    known = FINISH_REASONS.get(name)
    if known is None:
        raise ValueError(f"`finish_reason` is {reason!r}; known: {', '.join(FINISH_REASONS)}")
    return known


def _as_dict(item: Any) -> dict[str, Any]:
    if isinstance(item, BaseModel):
        item = item.model_dump()
    elif isinstance(item, str | bytes):
        try:
            item = msgspec.json.decode(item)
        except msgspec.DecodeError as error:
            raise ValueError(f"a chunk is a string that is not JSON: {error}") from error
    if not isinstance(item, dict):
        raise ValueError(f"a chunk is a {type(item).__name__}, not a dict with `token_ids`")
    return item


def _token_ids(values: Any) -> list[int]:
    if values is None:
        return []
    try:
        token_ids = [int(value) for value in values]
    except (TypeError, ValueError) as error:
        raise ValueError(f"`token_ids` is {values!r}, not a list of integers") from error
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < 2**32:
        raise ValueError("`token_ids` has a number outside the range of token ids")
    return token_ids


def _prefill(value: Any) -> PrefillReport | None:
    try:
        return msgspec.convert(msgspec.to_builtins(value), PrefillReport | None)
    except (msgspec.ValidationError, TypeError) as error:
        raise ValueError(f"`prefill` is no report of a prompt's place: {error}") from error


def _logprobs(chunk: dict[str, Any], num_tokens: int, num_top: int) -> list[TokenLogprobs] | None:
    """Return one per token, or None when one is missing: none may belong to another token."""
    chosen = chunk.get("log_probs")
    if chosen is None or any(value is None for value in chosen):
        return None
    if len(chosen) != num_tokens:
        raise ValueError(f"`log_probs` has {len(chosen)} entries for {num_tokens} tokens")
    top: Sequence[Any] = chunk.get("top_logprobs") or [()] * num_tokens
    if len(top) != num_tokens:
        raise ValueError(f"`top_logprobs` has {len(top)} entries for {num_tokens} tokens")
    return [
        TokenLogprobs(_logprob(value), _best(alternatives or (), num_top))
        for value, alternatives in zip(chosen, top, strict=True)
    ]


def _logprob(value: Any) -> float:
    """Return a log probability, where that of a token that was excluded is minus infinity."""
    number = max(float(value), LEAST_LOGPROB)
    if not number < math.inf:
        raise ValueError(f"a log probability is {value!r}")
    return number


def _best(alternatives: Sequence[dict[str, Any]], num_top: int) -> list[tuple[int, float]]:
    try:
        pairs = [(int(each["token_id"]), _logprob(each["logprob"])) for each in alternatives]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"`top_logprobs` needs `token_id` and `logprob`: {error!r}") from error
    return sorted(pairs, key=lambda pair: -pair[1])[:num_top]
