"""The vectors of a request's inputs, from workers that compute them in batches."""

import asyncio
import math
import sys
import time
from array import array
from collections.abc import Iterator

import msgspec

from tandem.frontend.access.limits import Header
from tandem.frontend.bodies.invalid import invalid_field
from tandem.frontend.catalog.catalog import TokenModel
from tandem.frontend.generation.deps import FrontendDeps
from tandem.frontend.generation.failover import Failover, decision_headers
from tandem.frontend.generation.generation import all_of
from tandem.frontend.http.api import Call
from tandem.frontend.telemetry.request_log import AnswerSummary, TokenCounts
from tandem.frontend.vectors.inputs import VectorInputs
from tandem.runtime.errors import ProtocolError, TandemError
from tandem.runtime.plane.response_stream import ResponseStream
from tandem.runtime.wire.decoding import decoder
from tandem.runtime.wire.messages import VectorKind, VectorRequest, Vectors, encode, pack_tokens

_MOST_INPUTS = 32  # of a batch
_MOST_TOKENS = 32_768  # of a batch of several inputs
_MOST_NUMBERS = 2**22  # of an answer
_NUMBER_BYTES = 4
_decode = decoder(Vectors)


class VectorRun:
    """The batches of one request, each at a worker; all are computed beside one another."""

    def __init__(
        self,
        kind: VectorKind,
        inputs: VectorInputs,
        dimensions: int | None,
        model: TokenModel,
        call: Call,
        deps: FrontendDeps,
    ) -> None:
        self._num_inputs = len(inputs.token_ids)
        self._num_tokens = inputs.num_tokens
        self._context = call.context
        self._batches = [
            _Batch(kind, inputs, part, dimensions, model, call, deps)
            for part in _parts(inputs.token_ids)
        ]

    async def vectors(self) -> list["array[float]"]:
        """Return the vector of each input. Raises the first error of a batch."""
        await all_of([batch.run(self._num_inputs) for batch in self._batches], self._context)
        found = [vector for batch in self._batches for vector in batch.vectors]
        if len({*map(len, found)}) != 1:
            raise ProtocolError("the workers gave vectors of several lengths")
        return found

    def summary(self) -> AnswerSummary:
        """Return the facts for the log; the worker is that of the first batch."""
        first = self._batches[0].decision
        times = [batch.done_s for batch in self._batches]
        tokens = TokenCounts(self._num_tokens, 0, 0)
        return AnswerSummary(
            max(times) if all(times) else 0.0, first.instance_id, tokens, None, first.reason
        )

    def headers(self) -> list[Header]:
        """Return the headers that name the worker of the first batch."""
        return decision_headers(self._batches[0].decision)


def _parts(token_ids: list[list[int]]) -> Iterator[range]:
    """Yield the places of the inputs of each batch."""
    start = num_tokens = 0
    for index, each in enumerate(token_ids):
        num_tokens += len(each)
        if index > start and (index - start == _MOST_INPUTS or num_tokens > _MOST_TOKENS):
            yield range(start, index)
            start, num_tokens = index, len(each)
    yield range(start, len(token_ids))


class _Batch:
    """A few inputs at one worker, or at another when it fails: a `WorkerSequence`."""

    num_generated = 0  # the next worker begins anew
    ttft_target_s = None

    def __init__(
        self,
        kind: VectorKind,
        inputs: VectorInputs,
        part: range,
        dimensions: int | None,
        model: TokenModel,
        call: Call,
        deps: FrontendDeps,
    ) -> None:
        given = inputs.token_ids[part.start : part.stop]
        block_size = model.card.block_size
        self.vectors: list[array[float]] = []
        self.done_s = 0.0  # perf_counter
        self._context = call.context
        self._num_blocks = sum([-(-len(each) // block_size) for each in given])
        self._num_all = 0
        self._field = inputs.field
        self._request = VectorRequest(
            request_id=f"{call.context.id}-{part.start}",
            model=model.card.name,
            kind=kind,
            inputs=[pack_tokens(each) for each in given],
            deadline_ms=0,  # set when it is sent
            dimensions=dimensions,
            second_starts=inputs.second_starts[part.start : part.stop],
            caller=call.owner,
        )
        self._failover = Failover(self._request.request_id, model, call.context, deps, call.owner)
        self.decision = self._failover.decision

    async def run(self, num_all: int) -> None:
        """Have the vectors computed, of a request with so many inputs."""
        self._num_all = num_all
        try:
            await self._failover.run(self)
        finally:
            self.decision = self._failover.decision

    def blocks(self, with_hashes: bool) -> tuple[int, list[bytes]]:
        return self._num_blocks, []

    def payload(self) -> bytes:
        deadline_ms = int(self._context.remaining_s() * 1e3)
        return encode(msgspec.structs.replace(self._request, deadline_ms=deadline_ms))

    async def follow(self, stream: ResponseStream) -> None:
        try:
            [answer, *_] = await stream.take()
        except StopAsyncIteration:
            raise ProtocolError("the worker ended without an answer") from None
        finally:
            stream.cancel()
        self._failover.begun()
        found = _decode(answer).vectors
        if len(found) != len(self._request.inputs):
            raise ProtocolError(f"{len(found)} vectors of {len(self._request.inputs)} inputs")
        self._check_sizes(found)
        for vector in found:
            self.vectors.append(_unpacked(vector))
            await asyncio.sleep(0)
        self.done_s = time.perf_counter()

    def _check_sizes(self, found: list[bytes]) -> None:
        wanted = 1 if self._request.kind == "rerank" else self._request.dimensions
        for each in found:
            num_numbers, rest = divmod(len(each), _NUMBER_BYTES)
            if rest or not num_numbers or (wanted is not None and num_numbers != wanted):
                raise ProtocolError(
                    f"a vector of {len(each)} bytes, not of {wanted or 'some'} numbers"
                )
            if num_numbers * self._num_all > _MOST_NUMBERS:
                raise invalid_field(
                    self._field,
                    f"has {self._num_all} entries, whose vectors of {num_numbers} numbers are more "
                    f"than the {_MOST_NUMBERS} of one answer",
                )

    async def settle(self, error: TandemError) -> bool:
        return False


def _unpacked(data: bytes) -> "array[float]":
    """Return the numbers of a vector. Raises ProtocolError for one that is not finite."""
    vector = array("f")
    vector.frombytes(data)
    if sys.byteorder == "big":
        vector.byteswap()
    if not math.isfinite(sum(vector)):
        raise ProtocolError("a vector has a number that is not finite")
    return vector
