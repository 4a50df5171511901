"""A runner without a model whose text is wrong as soon as one KV slot is."""

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.schedule.block_pool import BlockPool
from tandem.engine.schedule.outputs import SequenceOutput
from tandem.engine.schedule.sequence import PENDING, Chunk, OnLayers, Sequence
from tandem.engine.step.outcome import ScoredPart, UndrawnError
from tandem.runtime.errors import InternalError
from tandem.runtime.wire.messages import SamplingParams, StopConditions, TokenLogprobs

NUM_LAYERS = 6
VOCAB_SIZE = 500
EOS = VOCAB_SIZE + 1  # never drawn by chance
GARBAGE = 666  # what a step that fails leaves in its slots


def chained(before: int, token_id: int) -> int:
    data = before.to_bytes(8, "little") + token_id.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def drawn(chain: int, seed: int, script: dict[int, int], position: int) -> int:
    """The token at `position`: from the script, or a hash of everything before it."""
    return script.get(position, chained(chain, seed) % VOCAB_SIZE)


@dataclass(slots=True)
class FakeToken:
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class ChunkRecord:
    """What the device was sent of one chunk: nothing that the host changes later is seen."""

    seq: Sequence  # who it is, no more
    batch_row: int
    token_ids: list[int]  # up to the chunk's end
    block_table: list[int]
    start: int
    end: int
    samples: bool


@dataclass
class FakeStep:
    """A launched step. Its tokens exist once the device has computed it."""

    runner: "FakeRunner"
    records: list[ChunkRecord]
    written_blocks: set[int]
    seconds: float
    error: Exception | None = None
    drawn: list[FakeToken] = field(default_factory=list)

    def tokens(self) -> list[FakeToken]:
        self.runner.catch_up(self)
        self.runner.uncollected.remove(self)
        if self.error is not None:
            raise self.error
        sampled = [record.seq.request_id for record in self.records if record.samples]
        if self.runner.not_finite.intersection(sampled):
            reasons = {
                row: InternalError(f"logits are not finite for request {name}")
                for row, name in enumerate(sampled)
                if name in self.runner.not_finite
            }
            raise UndrawnError(self.drawn, reasons)
        return self.drawn

    def prompt_scores(self) -> list[ScoredPart]:
        return []


@dataclass
class FakeRunner:
    """Keeps in every slot a hash of the tokens up to it, and reads them as attention would.

    A device that lags: it computes a step when somebody waits for it (or `catch_up`), in the order
    of launches. `script`: position |-> the token drawn there, whatever came before. Its layers have
    no K/V of their own: what it tells of them is told once all is in the slots.
    """

    num_blocks: int
    block_size: int
    script: dict[int, int] = field(default_factory=dict)
    fail_with: Exception | None = None  # by the next launch
    fail_later_with: Exception | None = None  # by the step that is launched next
    poison: set[str] = field(default_factory=set)  # no launch with one of these requests succeeds
    late_poison: set[str] = field(default_factory=set)  # nor does a step that was launched with one
    not_finite: set[str] = field(default_factory=set)  # requests for which nothing can be drawn
    pool: BlockPool | None = None
    max_num_seqs: int = 128
    seconds_of: Callable[[list[Chunk]], float] = field(default=lambda chunks: 1e-3)
    steps: list[list[tuple[str, int, int]]] = field(default_factory=list)
    logprobs: bool = False
    windows: tuple[int, ...] = (0,)  # of the groups of layers
    asked_for_layers: list[tuple[int, ...]] = field(default_factory=list)  # in steps that did
    uncollected: list[FakeStep] = field(default_factory=list)
    num_overlapped: int = 0  # steps launched while another was not collected

    def __post_init__(self) -> None:
        self.slots: list[int | None] = [None] * (self.num_blocks * self.block_size)
        kv_cache = SimpleNamespace(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            windows=self.windows,
        )
        self.device_kind = "cpu"
        self.kv_caches = [kv_cache]
        self.model_config = SimpleNamespace(
            eos_token_ids=(EOS,), max_position_embeddings=100_000, num_layers=NUM_LAYERS
        )
        self._queue: deque[FakeStep] = deque()  # not computed
        self._drawn: dict[int, int] = {}  # batch row |-> the last token drawn there
        self._spoiled: dict[Sequence, int] = {}  # |-> first position that a failed step computed

    def slot(self, table: list[int], position: int, group: int = 0) -> int:
        ordinal, offset = divmod(position, self.block_size)
        block_id = table[ordinal * len(self.windows) + group]
        assert block_id >= 0, f"position {position} of group {group} has no block"
        return block_id * self.block_size + offset

    def fill(self, seq: Sequence, start: int, end: int) -> int:
        """Write positions [start, end) after reading those in sight; returns the last hash."""
        return self._fill(seq.request_id, seq.token_ids, seq.block_table, start, end)

    def _fill(self, name: str, tokens: list[int], table: list[int], start: int, end: int) -> int:
        chain = 0
        for position in range(end):
            chain = chained(chain, tokens[position])
            for group, window in enumerate(self.windows):
                if window and position <= start - window:
                    continue
                slot = self.slot(table, position, group)
                if position >= start:
                    self.slots[slot] = chain
                assert self.slots[slot] == chain, f"{name} at {position} of group {group}"
        return chain

    def land(self, token_ids: list[int], fill: list[tuple[int, int]]) -> None:
        """Write the K/V of `token_ids` from outside: all of each (ordinal, block id)."""
        block_of, chain, num_groups = dict(fill), 0, len(self.windows)
        for position, token_id in enumerate(token_ids):
            chain = chained(chain, token_id)
            first, offset = position // self.block_size * num_groups, position % self.block_size
            for ordinal in range(first, first + num_groups):
                if ordinal in block_of:
                    self.slots[block_of[ordinal] * self.block_size + offset] = chain

    def launch(
        self,
        chunks: list[Chunk],
        on_layers: OnLayers | None = None,
        boundaries: Collection[int] = (),
    ) -> FakeStep:
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        names = {chunk.seq.request_id for chunk in chunks}
        if names & self.poison:
            raise OverflowError("poison")
        self.num_overlapped += bool(self.uncollected)
        self.steps.append([(seq.request_id, start, end) for seq, start, end, _ in chunks])
        records = [self._record(chunk) for chunk in chunks]
        batch_rows = {record.seq: record.batch_row for record in records}
        assert len(set(batch_rows.values())) == len(batch_rows), "two sequences have one batch_row"
        assert set(batch_rows.values()) <= set(range(self.max_num_seqs))
        step = FakeStep(self, records, self._written_blocks(records), self.seconds_of(chunks))
        step.error, self.fail_later_with = self.fail_later_with, None
        if names & self.late_poison:
            step.error = OverflowError("late poison")
        self._queue.append(step)
        self.uncollected.append(step)
        assert len(self.uncollected) <= 2
        if on_layers is not None:
            self.catch_up(step)
            self.asked_for_layers.append(tuple(boundaries))
            try:
                for num_layers in boundaries:
                    on_layers(num_layers, None)
            except Exception:
                self.uncollected.remove(step)
                raise
        return step

    def _record(self, chunk: Chunk) -> ChunkRecord:
        seq, start, end, samples = chunk
        assert samples == (end == len(seq.token_ids))
        assert PENDING not in seq.token_ids[: end - 1], "only the last token can be unknown"
        return ChunkRecord(
            seq, seq.batch_row, seq.token_ids[:end], list(seq.block_table), start, end, samples
        )

    def _written_blocks(self, records: list[ChunkRecord]) -> set[int]:
        written = [
            self.slot(record.block_table, position, group)
            for record in records
            for position in range(record.start, record.end)
            for group in range(len(self.windows))
        ]
        assert len(set(written)) == len(written), "two chunks write one slot"
        blocks = {slot // self.block_size for slot in written}
        if self.pool is not None:
            cached = itertools.chain(*(known.values() for known in self.pool._blocks_of))
            assert not blocks.intersection(cached)
        return blocks

    def catch_up(self, last: FakeStep | None = None) -> None:
        """Compute what was launched, up to `last` if that is not yet computed."""
        if last is not None and last not in self._queue:
            return
        while self._queue:
            step = self._queue.popleft()
            for record in step.records:
                self._compute(record, step)
            if step is last:
                return

    def _compute(self, record: ChunkRecord, step: FakeStep) -> None:
        tokens, table, end = record.token_ids, record.block_table, record.end
        if tokens[-1] == PENDING:
            tokens[-1] = self._drawn[record.batch_row]
        if self._spoiled.get(record.seq, -1) >= record.start:
            del self._spoiled[record.seq]
        if step.error is not None:
            self._spoiled[record.seq] = record.start
        if record.seq in self._spoiled:
            for position in range(record.start, end):
                for group in range(len(self.windows)):
                    self.slots[self.slot(table, position, group)] = GARBAGE
            token_id = GARBAGE
        else:
            chain = self._fill(record.seq.request_id, tokens, table, record.start, end)
            token_id = drawn(chain, record.seq.sampling.seed, self.script, end)
        if record.samples:
            self._drawn[record.batch_row] = token_id
            step.drawn.append(FakeToken(token_id, TokenLogprobs(-0.5) if self.logprobs else None))

    def watch(self, pool: BlockPool) -> None:
        """Assert that blocks which a launched step writes are neither given away nor shared."""
        self.pool = pool
        free, publish = pool.free, pool.publish

        def watched_free(block_ids: list[int]) -> None:
            free(block_ids)
            for step in self.uncollected:
                assert all(pool._num_refs[i] > 0 for i in step.written_blocks), "freed too early"

        def watched_publish(block_ids: list[int], hashes: list[bytes], group: int = 0) -> int:
            assert all(step.written_blocks.isdisjoint(block_ids) for step in self.uncollected)
            return publish(block_ids, hashes, group)

        pool.free, pool.publish = watched_free, watched_publish


def undisturbed(seq: Sequence, script: dict[int, int] | None = None) -> list[int]:
    """The text that `seq` must give, computed without any engine; call before it runs."""
    chain = 0
    for token_id in seq.token_ids:
        chain = chained(chain, token_id)
    text: list[int] = []
    for position in range(len(seq.token_ids), len(seq.token_ids) + seq.stop.max_tokens):
        token_id = drawn(chain, seq.sampling.seed, script or {}, position)
        stops = token_id == EOS or token_id in seq.stop.stop_token_ids
        if stops and len(text) >= seq.stop.min_tokens:
            break
        text.append(token_id)
        chain = chained(chain, token_id)
    return text


def make_seq(
    request_id: str,
    prompt: list[int],
    max_tokens: int = 8,
    *,
    seed: int = 0,
    prefill_only: bool = False,
    num_layer_groups: int = 1,
    cache_salt: str = "",
    stop: StopConditions | None = None,
) -> Sequence:
    return Sequence(
        request_id=request_id,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(seed=seed),
        stop=stop or StopConditions(max_tokens=max_tokens),
        cache_salt=cache_salt,
        prefill_only=prefill_only,
        num_layer_groups=num_layer_groups,
    )


@dataclass
class Harness:
    """An engine over a FakeRunner, and what it gave so far."""

    engine: Engine
    runner: FakeRunner
    texts: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, SequenceOutput] = field(default_factory=dict)
    outputs: list[SequenceOutput] = field(default_factory=list)

    def take(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            self.outputs.append(output)
            assert output.request_id not in self.finished, "output after the last"
            self.texts.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.finished[output.request_id] = output

    def step(self) -> None:
        self.engine.launch()
        self.engine.check_invariants()
        self.take(self.engine.collect())
        self.engine.check_invariants()

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps")

    def assert_all_free(self) -> None:
        pool = self.engine.block_pool
        assert pool.num_free + pool.num_cached == pool.num_blocks


def make_harness(
    num_blocks: int = 64,
    block_size: int = 4,
    script: dict[int, int] | None = None,
    windows: tuple[int, ...] = (0,),
    **config: object,
) -> Harness:
    runner = FakeRunner(num_blocks, block_size, script or {}, windows=windows)
    engine = Engine(EngineConfig(block_size=block_size, **config), runner)
    runner.watch(engine.block_pool)
    runner.max_num_seqs = engine.scheduler.max_num_seqs
    return Harness(engine, runner)


@pytest.fixture(params=[False, True], ids=["in step", "overlapped"])
def fake(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The helpers of this file, for engines whose steps overlap and for others."""
    overlap: bool = request.param
    return SimpleNamespace(
        overlap=overlap,
        make_harness=partial(make_harness, overlap=overlap),
        make_seq=make_seq,
        undisturbed=undisturbed,
        FakeToken=FakeToken,
        FakeRunner=FakeRunner,
        EOS=EOS,
        NUM_LAYERS=NUM_LAYERS,
    )
