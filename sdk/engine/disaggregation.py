"""Prefill and decode apart: an engine's role, and what its `generate` does about it."""

from enum import Enum
from typing import Any

from tandem.sdk.engine.types import GenerateRequest
from tandem.sdk.exceptions import PrefillResultMissing


class DisaggregationMode(Enum):
    """What part of a request an engine does."""

    AGGREGATED = "agg"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"  # a name only: no worker serves it


def enforce_prefill_max_tokens(request: GenerateRequest) -> GenerateRequest:
    """Sets `max_tokens` of this request to 1, in place: a prefill engine makes no more."""
    request.setdefault("stop_conditions", {})["max_tokens"] = 1
    return request


def extract_prefill_result(request: GenerateRequest) -> dict[str, Any] | None:
    """What the prefill worker left for this request; None where it went through none."""
    return request.get("prefill_result")


def require_prefill_result(request: GenerateRequest, mode: DisaggregationMode) -> dict[str, Any]:
    """As `extract_prefill_result`. Raises PrefillResultMissing, and others try the request."""
    result = extract_prefill_result(request)
    if result is None:
        raise PrefillResultMissing(
            f"a {mode.value} engine got a request without prefill_result: no prefill worker "
            "could take it"
        )
    return result
