"""The bounds of a request's numbers, as a worker checks them."""

from typing import Any

import msgspec
import pytest

from tandem.runtime.errors import InvalidRequestError, ProtocolError
from tandem.runtime.wire.decoding import decoder
from tandem.runtime.wire.handoff_messages import Claimed
from tandem.runtime.wire.messages import (
    LARGEST_GRAMMAR_BYTES,
    GenerateRequest,
    Grammar,
    SamplingParams,
    StopConditions,
    encode,
    pack_tokens,
)
from tandem.runtime.wire.request_bounds import (
    LARGEST_PROMPT_LOGPROBS,
    check_token_id,
    checked_token_ids,
)

VOCAB_SIZE = 100
decode_request = decoder(GenerateRequest, InvalidRequestError)
NAN, INF = float("nan"), float("inf")


def request(
    token_ids: bytes = b"", stop: dict[str, Any] | None = None, **sampling: Any
) -> GenerateRequest:
    """A request as it arrives: encoded and decoded."""
    sent = GenerateRequest(
        request_id="r",
        model="m",
        token_ids=token_ids or pack_tokens([1, 2, 3]),
        sampling=SamplingParams(**sampling),
        stop=StopConditions(**{"max_tokens": 9, **(stop or {})}),
        deadline_ms=1000,
    )
    return decode_request(encode(sent))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (-0.1, NAN, INF, 1e300)],
        *[("top_p", value) for value in (-0.1, 1.1, NAN)],
        *[("top_k", value) for value in (-1, 2**31, 2**63 + 5)],
        *[("min_p", value) for value in (-0.1, 1.1, NAN)],
        *[("presence_penalty", value) for value in (NAN, INF, -INF, 1e39)],
        *[("frequency_penalty", value) for value in (NAN, INF, -INF, -1e39)],
        *[("repetition_penalty", value) for value in (0.0, 1e-40, 5e-324, -1.0, NAN, INF)],
        *[("logit_bias", {7: value}) for value in (NAN, INF, -INF, 1e39)],
        *[("logit_bias", {token_id: 1.0}) for token_id in (-1, VOCAB_SIZE, 2**63)],
        ("seed", -1),
        *[("logprobs", value) for value in (-3, VOCAB_SIZE + 1, 2**63)],
    ],
)
def test_a_number_out_of_bounds_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        checked_token_ids(request(**{field: value}), VOCAB_SIZE)
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_tokens", value) for value in (-1, 2**63)],
        *[("min_tokens", value) for value in (-1, 2**31, 2**63 - 1)],
        *[("stop_token_ids", [token_id]) for token_id in (-1, VOCAB_SIZE, 2**63)],
        ("stop_token_ids", [5] * (VOCAB_SIZE + 1)),
    ],
)
def test_a_stop_condition_out_of_bounds_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        checked_token_ids(request(stop={field: value}), VOCAB_SIZE)
    assert caught.value.param == field


def test_log_probabilities_of_prompts_are_bounded_and_need_their_number() -> None:
    with pytest.raises(InvalidRequestError, match="prompt_logprobs"):
        checked_token_ids(request(prompt_logprobs=True), VOCAB_SIZE)
    longest = pack_tokens([1] * (LARGEST_PROMPT_LOGPROBS // 4))
    asked = {"prompt_logprobs": True, "logprobs": 3}
    assert checked_token_ids(request(longest, **asked), VOCAB_SIZE)
    with pytest.raises(InvalidRequestError, match=str(LARGEST_PROMPT_LOGPROBS)) as caught:
        checked_token_ids(request(longest + pack_tokens([1]), **asked), VOCAB_SIZE)
    assert caught.value.param == "prompt_logprobs"


@pytest.mark.parametrize("token_ids", [pack_tokens([3, VOCAB_SIZE]), b"odd"])
def test_tokens_that_no_model_has_are_refused(token_ids: bytes) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        checked_token_ids(request(token_ids), VOCAB_SIZE)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**31])
def test_a_token_of_a_peer_is_of_the_vocabulary(token_id: int) -> None:
    check_token_id(VOCAB_SIZE - 1, VOCAB_SIZE)
    with pytest.raises(InvalidRequestError, match=str(token_id)):
        check_token_id(token_id, VOCAB_SIZE)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0, "top_p": 0, "top_k": 2**31 - 1, "min_p": 1, "logprobs": VOCAB_SIZE},
        {"temperature": 2, "repetition_penalty": 0.01, "seed": 2**64 - 1, "logprobs": 0},
        {"presence_penalty": -2, "frequency_penalty": 2, "logit_bias": {0: -100, 99: 100}},
    ],
)
def test_numbers_at_their_bounds_pass(sampling: dict[str, Any]) -> None:
    stop = {"min_tokens": 2**31 - 1, "stop_token_ids": [0, VOCAB_SIZE - 1]}
    assert checked_token_ids(request(stop=stop, **sampling), VOCAB_SIZE) == [1, 2, 3]


def test_a_grant_is_checked_like_a_request() -> None:
    grant = Claimed(bytes(16), 1000, pack_tokens([4, 5]), SamplingParams(), [], [])
    assert checked_token_ids(grant, VOCAB_SIZE) == [4, 5]
    bad = msgspec.structs.replace(grant, sampling=SamplingParams(repetition_penalty=1e-40))
    with pytest.raises(ProtocolError, match="repetition_penalty"):
        decoder(Claimed)(encode(bad))


def test_a_grammar_is_bounded_in_bytes() -> None:
    def with_grammar(source: str) -> GenerateRequest:
        grammar = Grammar("regex", source)
        return msgspec.structs.replace(request(), grammar=grammar)

    assert checked_token_ids(with_grammar("é" * (LARGEST_GRAMMAR_BYTES // 2)), VOCAB_SIZE)
    with pytest.raises(InvalidRequestError, match=str(LARGEST_GRAMMAR_BYTES)) as caught:
        checked_token_ids(with_grammar("é" * (LARGEST_GRAMMAR_BYTES // 2) + "a"), VOCAB_SIZE)
    assert caught.value.param == "grammar"
