"""A runner without a model whose text is wrong as soon as one KV slot is."""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from tandem.engine.block_pool import BlockPool
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine, SequenceOutput
from tandem.engine.sequence import Chunk, OnLayers, Sequence
from tandem.runtime.messages import SamplingParams, StopConditions, TokenLogprobs

NUM_LAYERS = 6
VOCAB_SIZE = 500
EOS = VOCAB_SIZE + 1  # never drawn by chance


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


@dataclass
class FakeRunner:
    """Keeps in every slot a hash of the tokens up to it, and reads them as attention would.

    `script`: position |-> the token drawn there, whatever came before. Its layers have no K/V of
    their own: what it tells of them is told once all is in the slots.
    """

    num_blocks: int
    block_size: int
    script: dict[int, int] = field(default_factory=dict)
    fail_with: Exception | None = None
    pool: BlockPool | None = None
    steps: list[list[tuple[str, int, int]]] = field(default_factory=list)
    logprobs: bool = False
    asked_for_layers: list[tuple[int, ...]] = field(default_factory=list)  # in steps that did

    def __post_init__(self) -> None:
        self.slots: list[int | None] = [None] * (self.num_blocks * self.block_size)
        self.kv_cache = SimpleNamespace(num_blocks=self.num_blocks, block_size=self.block_size)
        self.model_config = SimpleNamespace(
            eos_token_ids=(EOS,), max_position_embeddings=100_000, num_layers=NUM_LAYERS
        )

    def slot(self, seq: Sequence, position: int) -> int:
        return seq.block_table[position // self.block_size] * self.block_size + (
            position % self.block_size
        )

    def fill(self, seq: Sequence, start: int, end: int) -> int:
        """Write positions [start, end) after reading all before; returns the last hash."""
        chain = 0
        for position in range(start):
            chain = chained(chain, seq.token_ids[position])
            assert self.slots[self.slot(seq, position)] == chain, f"{seq.request_id} at {position}"
        for position in range(start, end):
            chain = chained(chain, seq.token_ids[position])
            self.slots[self.slot(seq, position)] = chain
        return chain

    def land(self, token_ids: list[int], fill: list[tuple[int, int]]) -> None:
        """Write the K/V of `token_ids` from outside: all of each (ordinal, block id)."""
        block_of, chain = dict(fill), 0
        for position, token_id in enumerate(token_ids):
            chain = chained(chain, token_id)
            ordinal, offset = divmod(position, self.block_size)
            if ordinal in block_of:
                self.slots[block_of[ordinal] * self.block_size + offset] = chain

    def run(
        self,
        chunks: list[Chunk],
        on_layers: OnLayers | None = None,
        boundaries: Collection[int] = (),
    ) -> list[FakeToken]:
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        self.steps.append([(seq.request_id, start, end) for seq, start, end, _ in chunks])
        written = [
            self.slot(seq, position)
            for seq, start, end, _ in chunks
            for position in range(start, end)
        ]
        assert len(set(written)) == len(written), "two chunks write one slot"
        if self.pool is not None:
            public = {self.pool._block_of[block_hash] for block_hash in self.pool.hashes()}
            assert not public & {slot // self.block_size for slot in written}
        tokens = []
        for seq, start, end, samples in chunks:
            chain = self.fill(seq, start, end)
            assert samples == (end == len(seq.token_ids))
            if samples:
                token_id = drawn(chain, seq.sampling.seed, self.script, end)
                tokens.append(FakeToken(token_id, TokenLogprobs(-0.5) if self.logprobs else None))
        if on_layers is not None:
            self.asked_for_layers.append(tuple(boundaries))
            for num_layers in boundaries:
                on_layers(num_layers, None)
        return tokens


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
        self.take(self.engine.step())
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
    **config: object,
) -> Harness:
    runner = FakeRunner(num_blocks, block_size, script or {})
    engine = Engine(EngineConfig(block_size=block_size, **config), runner)
    runner.pool = engine.block_pool
    return Harness(engine, runner)


@pytest.fixture
def fake() -> SimpleNamespace:
    """The helpers of this file: make_harness, make_seq, undisturbed, FakeToken, EOS, NUM_LAYERS."""
    return SimpleNamespace(
        make_harness=make_harness,
        make_seq=make_seq,
        undisturbed=undisturbed,
        FakeToken=FakeToken,
        EOS=EOS,
        NUM_LAYERS=NUM_LAYERS,
    )
