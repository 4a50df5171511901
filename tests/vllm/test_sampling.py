"""Requests of the kit as vLLM's sampling parameters, and vLLM's outputs as chunks of the kit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from tandem.sdk.engine.types import GenerateRequest
from tandem.sdk.exceptions import InvalidArgument
from tandem.vllm.requests.sampling import Logprob, chunk_of, grammar_fields, sampling_fields

SCHEMA = {"kind": "json_schema", "source": '{"type": "object"}'}


@dataclass
class Step:
    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Logprob]] | None = None
    finish_reason: str | None = None


@dataclass
class Value:
    logprob: float


def test_every_field_of_a_request_reaches_vllm() -> None:
    sampling = {
        "temperature": 0.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.5,
        "frequency_penalty": 0.25, "repetition_penalty": 1.5, "logit_bias": {3: 1.0}, "seed": 9,
        "allowed_token_ids": [3, 4],
    }  # fmt: skip
    stop = {"max_tokens": 7, "min_tokens": 2, "stop_token_ids": [4], "ignore_eos": True}
    request: GenerateRequest = {
        "token_ids": [1],
        "sampling_options": {**sampling, "n": 1},
        "stop_conditions": stop,
        "output_options": {"logprobs": 3},
    }
    assert sampling_fields(request) == {**sampling, **stop, "logprobs": 3, "detokenize": False}


def test_a_request_without_options_has_vllms_own_values() -> None:
    fields = sampling_fields({"token_ids": [1]})
    assert {name for name, value in fields.items() if value} == set()
    assert fields["logprobs"] is None and fields["max_tokens"] is None


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("json_schema", "json"),
        ("regex", "regex"),
        ("lark", "grammar"),
        ("gbnf", "grammar"),
        ("structural_tag", "structural_tag"),
    ],
)
def test_each_kind_of_grammar_has_its_field(kind: str, field: str) -> None:
    request: GenerateRequest = {
        "token_ids": [1],
        "sampling_options": {"grammar": {"kind": kind, "source": "rules"}},
    }
    assert grammar_fields(request) == {field: "rules"}
    assert grammar_fields({"token_ids": [1], "sampling_options": {"grammar": None}}) is None


def test_a_begun_answer_with_a_grammar_is_refused_by_name() -> None:
    request: GenerateRequest = {
        "token_ids": [1, 2],
        "sampling_options": {"grammar": SCHEMA},
        "extra_args": {"num_generated": 1},
    }
    with pytest.raises(InvalidArgument, match="grammar") as caught:
        grammar_fields(request)
    assert caught.value.param == "grammar"


def test_log_probabilities_stand_beside_their_tokens_best_first() -> None:
    rows = [{5: Value(-2.0), 8: Value(-0.5)}, {6: Value(-0.1)}]
    chunk = chunk_of(Step([5, 6], rows), 3, 0)
    assert chunk["log_probs"] == [-2.0, -0.1]
    assert [[each["token_id"] for each in row] for row in chunk["top_logprobs"]] == [[8, 5], [6]]
    assert [each["rank"] for each in chunk["top_logprobs"][0]] == [1, 2]
    assert "finish_reason" not in chunk and "completion_usage" not in chunk


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_the_last_chunk_has_the_reason_and_the_usage(reason: str) -> None:
    assert chunk_of(Step([5, 6], None, reason), 3, 10) == {
        "token_ids": [5, 6],
        "index": 0,
        "finish_reason": reason,
        "completion_usage": {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15},
    }


def test_the_token_that_stops_an_answer_is_no_part_of_it() -> None:
    rows = [{5: Value(-2.0)}, {0: Value(-0.1)}]
    chunk = chunk_of(Step([5, 0], rows, "stop"), 3, 10)
    assert chunk["token_ids"] == [5] and chunk["stop_reason"] == 0
    assert chunk["log_probs"] == [-2.0] and len(chunk["top_logprobs"]) == 1
    assert chunk["completion_usage"]["completion_tokens"] == 11
