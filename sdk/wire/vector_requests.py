"""Between the wire's VectorRequest and Vectors and the dicts of token models.

`serving.py` makes one VectorCodec per request.
"""

import math
import sys
from array import array
from typing import Any

from tandem.runtime.wire.messages import VectorRequest, Vectors, encode, unpack_tokens


class VectorCodec:
    """One request for vectors or scores: `request` is the dict that its handler gets.

    The handler answers one dict, with `embeddings`, a list of numbers per input, or for kind
    `rerank` with `scores`, a number per input.
    """

    __slots__ = ("_kind", "_num_inputs", "request")

    def __init__(self, message: VectorRequest) -> None:
        self._kind = message.kind
        self._num_inputs = len(message.inputs)
        self.request: dict[str, Any] = {
            "token_ids": [unpack_tokens(each) for each in message.inputs],
            "kind": message.kind,
            "model": message.model,
            "request_id": message.request_id,
            "dimensions": message.dimensions,
            "second_starts": message.second_starts,
        }

    def encode(self, item: Any) -> bytes:
        """Return a handler's answer as Vectors. Raise ValueError naming the key at fault."""
        key = "embeddings" if self._kind == "embeddings" else "scores"
        if not isinstance(item, dict) or key not in item:
            raise ValueError(f"the answer to a request of kind {self._kind!r} has no `{key}`")
        values = list(item[key])
        if len(values) != self._num_inputs:
            raise ValueError(f"`{key}` has {len(values)} entries for {self._num_inputs} inputs")
        if key == "scores":
            values = [[value] for value in values]
        return encode(Vectors([packed_vector(each, key) for each in values]))

    def end(self) -> bytes | None:
        return None


def packed_vector(numbers: Any, key: str) -> bytes:
    """Return numbers as little-endian float32. Raise ValueError naming `key`."""
    try:
        vector = array("f", numbers)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"`{key}` has something else than numbers: {error}") from error
    if not vector or not math.isfinite(sum(vector)):
        raise ValueError(f"`{key}` has an empty vector, or a number that is not finite")
    if sys.byteorder == "big":
        vector.byteswap()
    return vector.tobytes()
