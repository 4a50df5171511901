"""Token ids in every shape that engines meet, and the options of logprobs."""

import logging
from array import array
from typing import Any

import pytest
from pydantic import BaseModel

from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.messages import pack_tokens
from tandem.sdk.dynamo.request_options import (
    normalize_request_token_ids,
    parse_logprob_options,
    serialize_structural_tag,
    token_ids_len,
    token_ids_to_list,
)

TOKENS = [1, 70_000, 3]


@pytest.mark.parametrize(
    "given",
    [
        TOKENS, tuple(TOKENS), array("I", TOKENS), pack_tokens(TOKENS),
        bytearray(pack_tokens(TOKENS)), memoryview(pack_tokens(TOKENS)),
    ],
    ids=lambda given: type(given).__name__,
)  # fmt: skip
def test_token_ids_of_any_shape_become_a_list(given: Any) -> None:
    assert token_ids_to_list(given) == TOKENS
    assert token_ids_len(given) == 3
    request = {"token_ids": given}
    assert normalize_request_token_ids(request) is request
    assert request["token_ids"] == TOKENS


def test_absent_token_ids_stay_absent() -> None:
    assert token_ids_to_list(None) is None
    assert token_ids_len(None) == 0
    assert normalize_request_token_ids({"model": "m"}) == {"model": "m"}


def test_half_a_token_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="7 packed bytes"):
        token_ids_to_list(b"\0" * 7)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (None, None)),
        ({"logprobs": 0}, (0, None)),
        ({"logprobs": "3", "prompt_logprobs": 5}, (3, 5)),
        ({"logprobs": ""}, (None, None)),
    ],
)
def test_logprob_options_are_counts(options: dict[str, Any], expected: tuple[Any, Any]) -> None:
    assert parse_logprob_options(options) == expected


@pytest.mark.parametrize("wrong", [-1, "many", [2]])
def test_wrong_logprob_options_are_off_with_a_warning(
    wrong: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse_logprob_options({"logprobs": wrong}) == (None, None)
    assert "output_options.logprobs is" in caplog.text


class Tag(BaseModel):
    type: str = "structural_tag"


@pytest.mark.parametrize("given", [{"type": "structural_tag"}, Tag(), '{"type": "structural_tag"}'])
def test_a_structural_tag_of_any_shape_becomes_json(given: Any) -> None:
    assert serialize_structural_tag(given) == '{"type": "structural_tag"}'
    assert serialize_structural_tag(None) is None
