"""Bounds of a request that depend on the model, checked where a worker receives it.

Those that do not stand at the fields (`runtime.messages`).
"""

from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.handoff_messages import Claimed
from tandem.runtime.wire.messages import (
    LARGEST_GRAMMAR_BYTES,
    GenerateRequest,
    Grammar,
    SamplingParams,
    StopConditions,
    unpack_tokens,
)

LARGEST_PROMPT_LOGPROBS = 2**18  # log probabilities of prompts in one answer


def checked_token_ids(request: GenerateRequest | Claimed, vocab_size: int) -> list[int]:
    """Return the token ids of a request whose numbers are all within bounds.

    Raise InvalidRequestError, which names the field, for any other request: a step computes many
    requests at once, and none of them may hold a number that the step cannot compute.
    """
    try:
        token_ids = unpack_tokens(request.token_ids)
    except ValueError:
        raise InvalidRequestError("the token ids are not whole u32", param="prompt") from None
    if token_ids:
        _check("prompt", max(token_ids), 0, vocab_size - 1)
    _check_sampling(request.sampling, vocab_size)
    _check_prompt_logprobs(request.sampling, len(token_ids))
    _check_stop(request.stop, vocab_size)
    if request.grammar is not None:
        check_grammar_size(request.grammar)
    return token_ids


def check_grammar_size(grammar: Grammar) -> None:
    """Raise InvalidRequestError for a grammar that is longer than any worker takes."""
    num_bytes = len(grammar.source.encode())
    if num_bytes > LARGEST_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"the {grammar.kind} has {num_bytes} bytes, at most {LARGEST_GRAMMAR_BYTES} are taken",
            param="grammar",
        )


def check_token_id(token_id: int, vocab_size: int) -> None:
    """Raise InvalidRequestError for a token id outside of the vocabulary."""
    _check("token_id", token_id, 0, vocab_size - 1)


def _check_sampling(params: SamplingParams, vocab_size: int) -> None:
    for token_id in params.logit_bias:
        _check("logit_bias", token_id, 0, vocab_size - 1)
    _check_token_rules(params, vocab_size)
    if params.logprobs is not None:
        _check("logprobs", params.logprobs, 0, vocab_size)


def _check_token_rules(params: SamplingParams, vocab_size: int) -> None:
    if params.allowed_token_ids:
        _check("allowed_token_ids", len(params.allowed_token_ids), 0, vocab_size)
        _check("allowed_token_ids", max(params.allowed_token_ids), 0, vocab_size - 1)
    for word in params.bad_words:
        _check("bad_words", max(word), 0, vocab_size - 1)


def _check_prompt_logprobs(params: SamplingParams, num_tokens: int) -> None:
    if not params.prompt_logprobs:
        return
    if params.logprobs is None:
        raise InvalidRequestError("prompt_logprobs needs logprobs", param="prompt_logprobs")
    check_num_prompt_logprobs(num_tokens, params.logprobs, "prompt_logprobs")


def check_num_prompt_logprobs(num_tokens: int, num_top: int, param: str) -> None:
    """Raise InvalidRequestError for more log probabilities of prompts than one answer may have."""
    num_all = num_tokens * (1 + num_top)
    if num_all > LARGEST_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"`{param}`: {num_tokens} prompt tokens with {1 + num_top} log probabilities each are "
            f"{num_all}, the most of one answer is {LARGEST_PROMPT_LOGPROBS}",
            param=param,
        )


def _check_stop(stop: StopConditions, vocab_size: int) -> None:
    if len(stop.stop_token_ids) > vocab_size:
        raise InvalidRequestError(
            f"stop_token_ids has {len(stop.stop_token_ids)} entries, at most {vocab_size} differ",
            param="stop_token_ids",
        )
    for token_id in stop.stop_token_ids:
        _check("stop_token_ids", token_id, 0, vocab_size - 1)


def _check(field: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidRequestError(
            f"{field} has {value}, which is not between {least} and {most}", param=field
        )
