"""The engine: sequences in, tokens out, one step at a time, on one thread."""

from collections import Counter, deque
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tandem.engine.config import EngineConfig
from tandem.engine.limits import check_limits, longest_sequence
from tandem.engine.outputs import LoadStats, Reservation, SequenceOutput, load_of
from tandem.engine.schedule.block_pool import BlockPool, HashListener
from tandem.engine.schedule.scheduler import Scheduler
from tandem.engine.schedule.sequence import Chunk, OnLayers, Sequence, SequenceStatus
from tandem.engine.schedule.step_cost import StepCost, longest_step_s
from tandem.engine.step.layer_stream import LayersListener, LayerStream
from tandem.engine.step.outcome import count_step, count_token, fail, still_running
from tandem.runtime.errors import InvalidRequestError, NotFoundError

if TYPE_CHECKING:
    from tandem.engine.memory.kv_cache import KvCache
    from tandem.engine.models.config import ModelConfig
    from tandem.engine.step.sampler import SampledToken


class Step(Protocol):
    """A launched step: the device computes it, or has done so already."""

    @property
    def seconds(self) -> float:
        """How long the device took for it; valid after `tokens`."""

    def tokens(self) -> "list[SampledToken]":
        """One token per chunk that samples, in the order of the chunks.

        Blocks until they are on the host and all K/V of the step is in the pool. Raises what the
        step raised; nothing of it is under way then either.
        """


class Runner(Protocol):
    """What computes steps: the model, or a stand-in for it."""

    model_config: "ModelConfig"
    kv_cache: "KvCache"

    def launch(
        self,
        chunks: list[Chunk],
        on_layers: OnLayers | None = None,
        boundaries: Collection[int] = (),
    ) -> Step:
        """Begin to compute `chunks` after all steps launched before; never waits for those.

        While it runs, `token_ids` of a chunk that samples ends at the chunk's end: what the step
        draws is not among them, what earlier steps draw is PENDING. Sequences, seats and tables
        may change as soon as it returns. `on_layers` hears of each boundary before it returns. When
        it raises, whatever it had begun is over: the chunks' blocks may go to others at once.
        """


class _Launched(NamedTuple):
    chunks: list[Chunk]
    step: Step
    stream: LayerStream | None


class Engine:
    """Continuous batching over a paged KV cache. Not thread-safe: one thread calls everything.

    With `overlap` a step is launched before the tokens of the one before it are collected, so that
    the device goes from one to the next. A sequence that ends is then computed for one step longer,
    and that is discarded. Any method may be called between `launch` and `collect`.

    `on_stored` and `on_removed` hear of block hashes that enter and leave the prefix cache.
    `on_layers` hears, within a step, how far the prompts got that ask for it (num_layer_groups).
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        on_stored: HashListener | None = None,
        on_removed: HashListener | None = None,
        on_layers: LayersListener | None = None,
    ) -> None:
        self.runner = runner
        self.on_layers = on_layers
        num_blocks, block_size = runner.kv_cache.num_blocks, runner.kv_cache.block_size
        self.max_model_len = longest_sequence(
            config, runner.model_config.max_position_embeddings, num_blocks * block_size
        )
        self.block_pool = BlockPool(
            num_blocks,
            block_size,
            config.enable_prefix_cache,
            on_stored,
            on_removed,
        )
        memory = runner.kv_cache.memory
        step_cost = StepCost(longest_step_s(config, memory))
        self.scheduler = Scheduler(config, self.block_pool, step_cost)
        self.overlap = memory == "VRAM" if config.overlap is None else config.overlap
        self._in_flight: deque[_Launched] = deque()  # oldest first
        self._unsaid: list[SequenceOutput] = []  # of sequences whose step could not be launched
        self._eos_token_ids = frozenset(runner.model_config.eos_token_ids)

    @property
    def has_work(self) -> bool:
        """Whether a step could do something now."""
        scheduler = self.scheduler
        if self._in_flight or self._unsaid:
            return True
        return bool(scheduler.running or scheduler.waiting) and not scheduler.is_blocked

    @property
    def num_in_flight(self) -> int:
        """Launched steps that are not collected."""
        return len(self._in_flight)

    def step(self) -> list[SequenceOutput]:
        """Compute the next tokens. A failing step fails its sequences, not the engine."""
        self.launch()
        return self.collect()

    def launch(self) -> None:
        """Give the device what it can do: the next step, with `overlap` also the one after it."""
        self._release_news()
        while len(self._in_flight) <= self.overlap and (chunks := self.scheduler.schedule()):
            try:
                launched = self._launch(chunks)
            except Exception as error:
                self._unsaid += fail(self.scheduler, still_running(chunks), error)
                return
            self._in_flight.append(launched)
            self.scheduler.launched(chunks)

    def collect(self) -> list[SequenceOutput]:
        """Wait for the oldest launched step, if there is one, and tell what it did."""
        self._release_news()
        outputs, self._unsaid = self._unsaid, []
        if not self._in_flight:
            return outputs
        scheduler = self.scheduler
        chunks, step, _ = self._in_flight.popleft()
        try:
            tokens = step.tokens()
        except Exception as error:
            scheduler.collected(chunks, computed=False)
            return outputs + fail(scheduler, still_running(chunks), error)
        scheduler.collected(chunks)
        scheduler.step_cost.observe(chunks, step.seconds)
        return outputs + count_step(scheduler, chunks, tokens)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises ContextLengthError or CapacityError if it can never fit."""
        self._accept(seq)
        self.scheduler.add(seq)

    def prefix_hit(self, seq: Sequence) -> int:
        """How many of its tokens the prefix cache holds now; takes nothing."""
        return self.scheduler.num_prefix_blocks(seq) * self.block_pool.block_size

    def reserve(self, seq: Sequence) -> Reservation | None:
        """Blocks for a remote prefill of `seq`'s prompt, or None when there are not enough now.

        Ends by `admit`, `prefill_locally` or `abort`. Raises what `add` raises.
        """
        self._accept(seq)
        if not self.scheduler.reserve(seq):
            return None
        num_cached = seq.num_reserved_cached_blocks
        return Reservation(
            fill=list(enumerate(seq.block_table))[num_cached:],
            cached_ordinals=list(range(num_cached)),
            num_cached_tokens=seq.num_cached_tokens,
        )

    def reserve_prefix(self, seq: Sequence, num_blocks: int) -> list[tuple[int, int]] | None:
        """Blocks to pull the first `num_blocks` of `seq`'s prompt into, before `seq` is added.

        (ordinal, block id) of those that the prefix cache lacks; none when it lacks none. They
        and the ones before them stay until `adopt_prefix` or `abort`. None: there is no prefix
        cache, or no room now. Raises what `add` raises.
        """
        self._accept(seq)
        if seq.request_id in self.scheduler.pulls:
            raise InvalidRequestError(f"request {seq.request_id} pulls its prefix already")
        return self.scheduler.reserve_prefix(seq, num_blocks)

    def adopt_prefix(self, request_id: str, *, proven: bool) -> None:
        """Let `add` find the blocks of `reserve_prefix`, or free them when nothing is `proven`.

        No write may land in them any more. Harmless if there are none.
        """
        self.scheduler.end_pull(request_id, proven=proven)

    def admit(self, request_id: str, first: "SampledToken") -> SequenceOutput:
        """Go on after a remote prefill: the K/V of the whole prompt is here and verified.

        The output holds the first token, counted once. Raises NotFoundError.
        """
        seq = self._reserved(request_id)
        self.scheduler.admit(seq)
        return count_token(self.scheduler, seq, seq.num_tokens, first)

    def prefill_locally(
        self, request_id: str, *, quarantined: bool, first: "SampledToken | None" = None
    ) -> SequenceOutput | None:
        """Give up a remote prefill and queue the sequence first. Raises NotFoundError.

        `quarantined`: writes may still land in the reserved blocks, so they are kept away from
        everybody until `release_quarantined`. `first`: the first token, when the client has it
        already; it is kept, not drawn again, and the output (else None) counts it.
        """
        seq = self._reserved(request_id)
        self.scheduler.requeue(seq, quarantined=quarantined)
        if first is None:
            return None
        return count_token(self.scheduler, seq, seq.num_tokens, first)

    def release_quarantined(self, block_ids: list[int]) -> None:
        """No write can land in these blocks any more."""
        self.scheduler.release_quarantined(block_ids)

    def abort(self, request_id: str, *, quarantined: bool = False) -> bool:
        """Forget a sequence in any state; False when there is none. It gives no more output.

        `quarantined`: writes may still land in its reserved blocks, as in `prefill_locally`;
        in those of `reserve_prefix` too.
        """
        was_pulling = self.scheduler.end_pull(request_id, proven=False, quarantined=quarantined)
        seq = self.scheduler.find(request_id)
        if seq is None:
            return was_pulling
        self.scheduler.drop(seq, quarantined=quarantined)
        return True

    def release(self, request_id: str) -> None:
        """Free what a finished prefill_only sequence still holds; harmless if it is gone."""
        seq = self.scheduler.find(request_id)
        if seq is not None and seq.status is SequenceStatus.FINISHED:
            self.scheduler.drop(seq)

    def fail_all(self, error: Exception) -> list[SequenceOutput]:
        """End every waiting and running sequence with an error; reservations stay.

        Waits for the launched steps, and discards what they did.
        """
        for launched in self._in_flight:
            with suppress(Exception):
                launched.step.tokens()
        self._in_flight.clear()
        scheduler = self.scheduler
        scheduler.all_collected()
        outputs, self._unsaid = self._unsaid, []
        seqs = [*scheduler.running.values(), *scheduler.waiting.values()]
        return outputs + fail(scheduler, seqs, error)

    def load(self) -> LoadStats:
        """The load at this moment."""
        return load_of(self.scheduler)

    def check_invariants(self) -> None:
        """Assert that every block is accounted for. Walks the whole pool: for tests and idling."""
        scheduler = self.scheduler
        scheduler.check_invariants()
        assert scheduler.num_in_flight == len(self._in_flight) <= 1 + self.overlap
        in_flight = Counter(chunk.seq for each in self._in_flight for chunk in each.chunks)
        for seq in (*scheduler.running.values(), *scheduler.parked.values(), *scheduler.leaving):
            assert seq.in_flight == in_flight.pop(seq, 0)
        assert not in_flight, "a launched step computes for a sequence that nobody knows"

    def _accept(self, seq: Sequence) -> None:
        """Check that `seq` can fit an empty engine, and give it the model's stop tokens."""
        if self.scheduler.find(seq.request_id) is not None:
            raise InvalidRequestError(f"request {seq.request_id} is here already")
        pool = self.block_pool
        check_limits(seq, self.max_model_len, pool.num_blocks, pool.block_size)
        stop_token_ids = seq.stop.stop_token_ids
        seq.stop_ids = frozenset() if seq.stop.ignore_eos else self._eos_token_ids
        if stop_token_ids:
            seq.stop_ids = seq.stop_ids.union(stop_token_ids)

    def _reserved(self, request_id: str) -> Sequence:
        seq = self.scheduler.remote.get(request_id)
        if seq is None:
            raise NotFoundError(f"request {request_id} does not wait for a remote prefill")
        return seq

    def _launch(self, chunks: list[Chunk]) -> _Launched:
        runner, held = self.runner, bool(self._in_flight)
        if self.on_layers is not None:
            num_layers = runner.model_config.num_layers
            stream = LayerStream(chunks, num_layers, self.on_layers, held=held)
            if stream:
                step = runner.launch(chunks, stream, stream.boundaries)
                return _Launched(chunks, step, stream)
        return _Launched(chunks, runner.launch(chunks), None)

    def _release_news(self) -> None:
        """Tell of the oldest launched step's layers: the outputs of all before it are told."""
        if self._in_flight and (stream := self._in_flight[0].stream) is not None:
            stream.release()
