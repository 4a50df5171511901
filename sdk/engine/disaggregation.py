"""Disaggregated engines: their roles, and helpers for their `generate`."""

from enum import Enum
from typing import Any

from tandem.sdk.engine.errors import PrefillResultMissing
from tandem.sdk.engine.types import GenerateRequest


class DisaggregationMode(Enum):
    """The part of a request that an engine computes."""

    AGGREGATED = "agg"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"  # a name only: encode engines are not supported


def enforce_prefill_max_tokens(request: GenerateRequest) -> GenerateRequest:
    """Set `max_tokens` of this request to 1, in place, for a prefill engine."""
    request.setdefault("stop_conditions", {})["max_tokens"] = 1
    return request


def extract_prefill_result(request: GenerateRequest) -> dict[str, Any] | None:
    """Return the prefill worker's result for this request, None if it has none."""
    return request.get("prefill_result")


def require_prefill_result(request: GenerateRequest, mode: DisaggregationMode) -> dict[str, Any]:
    """Return the prefill result. Raise PrefillResultMissing, and another worker is tried."""
    result = extract_prefill_result(request)
    if result is None:
        raise PrefillResultMissing(
            f"a {mode.value} engine got a request without prefill_result: no prefill worker "
            "computed its prompt"
        )
    return result
