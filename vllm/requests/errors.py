"""The kit's errors for those of vLLM."""

from typing import Any, cast

from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from tandem.sdk.engine.types import GenerateRequest, VectorRequest
from tandem.sdk.exceptions import (
    DynamoException,
    InvalidArgument,
    RouterQueueLimitExceeded,
    StreamIncomplete,
    WorkerUnavailable,
)


def translated(error: Exception, request: GenerateRequest | VectorRequest) -> Exception:
    """Return the kit's error for one of vLLM's."""
    if isinstance(error, DynamoException):
        return error
    if isinstance(error, EngineDeadError):
        return StreamIncomplete("vLLM's engine has died")
    if isinstance(error, VLLMClientError | ValueError):
        # vLLM names no parameter in its errors about grammars
        sampling = cast(dict[str, Any], request.get("sampling_options") or {})
        has_grammar = sampling.get("grammar") is not None
        param = getattr(error, "parameter", None) or ("grammar" if has_grammar else "request")
        return InvalidArgument(f"vLLM refuses the request: {error}", param=param)
    if isinstance(error, GracefulHTTPError):
        return RouterQueueLimitExceeded(f"vLLM takes no more requests: {error}")
    if isinstance(error, EngineGenerateError):
        if request.get("images") and isinstance(error.__cause__, AssertionError):
            return InvalidArgument(f"vLLM: a mark per image: {error.__cause__}", param="prompt")
        return WorkerUnavailable(f"vLLM failed: {error.__cause__!r}")
    return error
