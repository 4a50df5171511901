"""Dynamo's helpers that read the parts of a request."""

import json
import logging
from collections.abc import Mapping, MutableMapping
from typing import Any, TypeVar, cast

from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.messages import unpack_tokens

logger = logging.getLogger(__name__)

Request = TypeVar("Request", bound=Mapping[str, Any])
Packed = bytes | bytearray | memoryview
_BYTES_PER_TOKEN = 4


def token_ids_to_list(token_ids: Any) -> list[int] | None:
    """Return token ids as a list of ints, from a sequence, an array or packed little-endian u32.

    None stays None. Raise InvalidRequestError when packed bytes are not whole tokens.
    """
    if token_ids is None or isinstance(token_ids, list):
        return token_ids
    if isinstance(token_ids, Packed):
        try:
            return unpack_tokens(bytes(token_ids))
        except ValueError as error:
            raise InvalidRequestError(
                f"token_ids: {len(bytes(token_ids))} packed bytes are not whole tokens of "
                f"{_BYTES_PER_TOKEN}",
                param="token_ids",
            ) from error
    return [int(token) for token in token_ids]


def token_ids_len(token_ids: Any) -> int:
    """Return the number of tokens, packed or not; 0 for None."""
    if token_ids is None:
        return 0
    if isinstance(token_ids, Packed):
        return memoryview(token_ids).nbytes // _BYTES_PER_TOKEN
    return len(token_ids)


def normalize_request_token_ids(request: Request) -> Request:
    """Turn the request's `token_ids` into a list, in place, and return the request.

    Tandem's own workers always pass a list.
    """
    if "token_ids" in request:
        cast(MutableMapping[str, Any], request)["token_ids"] = token_ids_to_list(
            request["token_ids"]
        )
    return request


def parse_logprob_options(output_options: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return (`logprobs`, `prompt_logprobs`) of a request's `output_options`.

    None is off, 0 the chosen token's only, k also the k best. Any other value is off, with a
    warning.
    """
    return _count(output_options, "logprobs"), _count(output_options, "prompt_logprobs")


def _count(options: Mapping[str, Any], name: str) -> int | None:
    value = options.get(name)
    if value is None or value == "":
        return None
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = -1
    if count < 0:
        logger.warning("output_options.%s is %r: off", name, value)
        return None
    return count


def serialize_structural_tag(structural_tag: Any) -> str | None:
    """Return a structural tag as JSON: that of a dict or a Pydantic model, and text as it is."""
    if structural_tag is None or isinstance(structural_tag, str):
        return structural_tag
    dump = getattr(structural_tag, "model_dump", None)
    return json.dumps(structural_tag if dump is None else dump())
