"""The requests of a load as `tandem bench` describes it: lengths, arrivals and shared prefixes."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tandem.bench.load.load import LoadPlan, arrival_offsets_s
from tandem.bench.load.options import BenchOptions
from tandem.bench.load.trace import TraceWorkload
from tandem.bench.load.workload import Seeds, Workload
from tandem.runtime.errors import ConfigError
from tandem.runtime.wire.block_hash import DIGEST_BYTES, block_hashes

MAX_ID = 1 << 64  # of a trace's hash ids


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request; `hashes` name the full blocks of its prompt, by what they hold."""

    index: int
    num_prompt_tokens: int
    num_answer_tokens: int
    hashes: list[bytes]
    offset_s: float | None  # of a trace

    def resumed(self, num_generated: int, block_size: int) -> "PlannedRequest":
        """Return the request for the rest of its answer, after `num_generated` tokens of it."""
        num_tokens = self.num_prompt_tokens + num_generated
        grown = range(len(self.hashes), num_tokens // block_size)
        return PlannedRequest(
            self.index,
            num_tokens,
            self.num_answer_tokens - num_generated,
            self.hashes + _named(MAX_ID + self.index, grown),
            None,
        )


class PlannedLoad:
    """The same requests, in the same order, for every layout; each is made once.

    Raises ConfigError for a bad option or file.
    """

    def __init__(self, options: BenchOptions, seed: int, block_size: int, max_tokens: int) -> None:
        self.plan: LoadPlan = options.plan()
        self.seed = seed
        self._workload: Workload = options.workload()
        self._max_tokens = max_tokens
        self._made: list[PlannedRequest] = []
        self._source = itertools.islice(self._make(block_size), self.plan.num_requests)

    @property
    def total(self) -> int | None:
        """The number of requests, where that is known before."""
        if isinstance(self._workload, TraceWorkload):
            num_entries = len(self._workload.entries)
            return min(num_entries, self.plan.num_requests or num_entries)
        return self.plan.num_requests

    def requests(self) -> Iterator[PlannedRequest]:
        """Yield the requests in order. Raises ConfigError for one that no worker can hold."""
        for index in itertools.count():
            if index == len(self._made):
                request = next(self._source, None)
                if request is None:
                    return
                self._check(request)
                self._made.append(request)
            yield self._made[index]

    def arrivals(self) -> Iterator[tuple[PlannedRequest, float]]:
        """Yield the requests of an open loop, and the seconds after the start of each."""
        plan = self.plan
        offsets_s: Iterator[float | None] = itertools.repeat(None)
        if plan.request_rate is not None:
            offsets_s = arrival_offsets_s(plan.request_rate, plan.arrival, self.seed)
        for request, drawn_s in zip(self.requests(), offsets_s, strict=False):
            offset_s = request.offset_s if drawn_s is None else drawn_s
            assert offset_s is not None, "an open loop has a rate, or a trace's own arrivals"
            if self.is_over(offset_s):
                return
            yield request, offset_s

    def is_over(self, at_s: float) -> bool:
        """Return True if no request is sent at `at_s` any more."""
        return self.plan.duration_s is not None and at_s >= self.plan.duration_s

    def _check(self, request: PlannedRequest) -> None:
        num_tokens = request.num_prompt_tokens + request.num_answer_tokens
        if num_tokens > self._max_tokens:
            raise ConfigError(
                f"request {request.index} has {num_tokens} tokens, and a worker's KV pool holds "
                f"{self._max_tokens}: shorten it (--input-tokens, --trace-block-tokens, "
                "--max-input-tokens), or plan with more --engine.num_blocks"
            )

    def _make(self, block_size: int) -> Iterator[PlannedRequest]:
        if isinstance(self._workload, TraceWorkload):
            yield from requests_of_trace(self._workload, block_size)
            return
        prompts = self._workload.prompts(Seeds(self.seed, str(self.seed)))
        for index, spec in enumerate(prompts):
            assert isinstance(spec.prompt, list) and spec.num_output_tokens is not None
            hashes = block_hashes(spec.prompt, block_size)
            yield PlannedRequest(index, len(spec.prompt), spec.num_output_tokens, hashes, None)


def requests_of_trace(workload: TraceWorkload, block_size: int) -> Iterator[PlannedRequest]:
    """Yield a trace's requests. Its hash ids stand for a prompt up to their end, as hashes do."""
    per_id = workload.block_tokens
    start_ms = workload.entries[0].timestamp
    made: dict[tuple[int, int], list[bytes]] = {}  # (hash id, its place) |-> blocks that end in it
    for index, entry in enumerate(workload.entries):
        num_tokens, num_shared = workload.input_tokens(entry), len(entry.hash_ids) * per_id
        hashes: list[bytes] = []
        for place, hash_id in enumerate(entry.hash_ids):
            if (blocks := made.get((hash_id, place))) is None:
                ordinals = range(place * per_id // block_size, (place + 1) * per_id // block_size)
                blocks = made[hash_id, place] = _named(hash_id % MAX_ID, ordinals)
            hashes += blocks
        # a prompt's tokens beyond its hash ids are its own
        hashes += _named(MAX_ID + index, range(num_shared // block_size, num_tokens // block_size))
        del hashes[num_tokens // block_size :]
        offset_s = (entry.timestamp - start_ms) / 1e3 / workload.time_scale
        yield PlannedRequest(index, num_tokens, workload.output_tokens(entry), hashes, offset_s)


def _named(name: int, ordinals: range) -> list[bytes]:
    head = name.to_bytes(DIGEST_BYTES - 4, "big")
    return [head + ordinal.to_bytes(4, "big") for ordinal in ordinals]
