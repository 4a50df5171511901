"""The engine: sequences in, tokens out, one step at a time, on one thread."""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tandem.engine.block_pool import BlockPool, HashListener
from tandem.engine.config import EngineConfig
from tandem.engine.limits import check_limits, longest_sequence
from tandem.engine.scheduler import Scheduler
from tandem.engine.sequence import Chunk, OnLayers, Sequence, SequenceStatus
from tandem.engine.streaming import LayersListener, LayerStream
from tandem.runtime.errors import (
    InternalError,
    InvalidRequestError,
    NotFoundError,
    TandemError,
)
from tandem.runtime.messages import FinishReason, LoadReport, Role, TokenLogprobs

if TYPE_CHECKING:
    from tandem.engine.kv_cache import KvCache
    from tandem.engine.model_config import ModelConfig
    from tandem.engine.sampler import SampledToken

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What computes a step: the model, or a stand-in for it."""

    model_config: "ModelConfig"
    kv_cache: "KvCache"

    def run(
        self,
        chunks: list[Chunk],
        on_layers: OnLayers | None = None,
        boundaries: Collection[int] = (),
    ) -> "list[SampledToken]":
        """One token per chunk that samples, in order; `on_layers` hears of each boundary."""


@dataclass(slots=True)
class SequenceOutput:
    """What one step did for one sequence. The output with a `finish_reason` is its last."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per token id, if asked for
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended it, which is not in token_ids
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0  # positions below have K/V; grows with each chunk of a prompt
    error: TandemError | None = None  # with finish_reason "error"


@dataclass(slots=True, frozen=True)
class Reservation:
    """Blocks that a remote prefill fills. They are the engine's until the handoff has ended."""

    fill: list[tuple[int, int]]  # (ordinal in the prompt, block id)
    cached_ordinals: list[int]  # blocks of the prompt that are here already
    num_cached_tokens: int


@dataclass(slots=True, frozen=True)
class LoadStats:
    """The engine's load at one moment. Blocks held are those not free, cached or quarantined."""

    num_running: int
    num_waiting: int
    num_remote: int  # waiting for a remote prefill
    num_waiting_tokens: int  # known tokens that no step has computed yet
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_quarantined_blocks: int
    num_preemptions: int  # since the start

    def report(self, instance_id: str, epoch: str, role: Role) -> LoadReport:
        """What others are told of it; who waits for a remote prefill waits."""
        return LoadReport(
            instance_id=instance_id,
            epoch=epoch,
            role=role,
            num_running=self.num_running,
            num_waiting=self.num_waiting + self.num_remote,
            num_waiting_tokens=self.num_waiting_tokens,
            num_blocks=self.num_blocks,
            num_free_blocks=self.num_free_blocks,
            num_cached_blocks=self.num_cached_blocks,
        )


class Engine:
    """Continuous batching over a paged KV cache. Not thread-safe: one thread calls everything.

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
        self.scheduler = Scheduler(config, self.block_pool)
        self._eos_token_ids = frozenset(runner.model_config.eos_token_ids)

    @property
    def has_work(self) -> bool:
        """Whether a step could do something now."""
        scheduler = self.scheduler
        return bool(scheduler.running or scheduler.waiting) and not scheduler.is_blocked

    def step(self) -> list[SequenceOutput]:
        """Compute the next tokens. A failing runner fails this step's sequences, not the engine."""
        chunks = self.scheduler.schedule()
        if not chunks:
            return []
        try:
            tokens = self._run(chunks)
        except Exception as error:
            return self._fail([chunk.seq for chunk in chunks], error)
        return self._postprocess(chunks, tokens)

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
        return self._append(seq, first)

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
        return None if first is None else self._append(seq, first)

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
        """End every waiting and running sequence with an error; reservations stay."""
        scheduler = self.scheduler
        return self._fail([*scheduler.running.values(), *scheduler.waiting.values()], error)

    def load(self) -> LoadStats:
        scheduler, pool = self.scheduler, self.block_pool
        num_waiting_tokens = sum(len(seq.token_ids) for seq in scheduler.waiting.values())
        for seq in scheduler.running.values():
            num_waiting_tokens += len(seq.token_ids) - seq.num_computed_tokens
        return LoadStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_remote=len(scheduler.remote),
            num_waiting_tokens=num_waiting_tokens,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_quarantined_blocks=pool.num_quarantined,
            num_preemptions=scheduler.num_preemptions,
        )

    def check_invariants(self) -> None:
        """Assert that every block is accounted for. Walks the whole pool: for tests and idling."""
        self.scheduler.check_invariants()

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

    def _run(self, chunks: list[Chunk]) -> "list[SampledToken]":
        runner = self.runner
        if self.on_layers is not None:
            stream = LayerStream(chunks, runner.model_config.num_layers, self.on_layers)
            if stream:
                return runner.run(chunks, stream, stream.boundaries)
        return runner.run(chunks)

    def _postprocess(
        self, chunks: list[Chunk], tokens: "list[SampledToken]"
    ) -> list[SequenceOutput]:
        outputs = []
        next_token = iter(tokens).__next__
        advance = self.scheduler.advance
        for seq, _, end, samples in chunks:
            advance(seq, end)
            if samples:
                outputs.append(self._append(seq, next_token()))
            elif seq.prefill_only:
                outputs.append(
                    SequenceOutput(
                        seq.request_id,
                        [],
                        num_cached_tokens=seq.num_cached_tokens,
                        num_computed_tokens=end,
                    )
                )
        return outputs

    def _append(self, seq: Sequence, token: "SampledToken") -> SequenceOutput:
        """Count a new token and end the sequence if it was the last."""
        token_id = token.token_id
        finish_reason = "length" if seq.prefill_only else seq.finish_reason_after(token_id)
        output = SequenceOutput(
            seq.request_id,
            [],
            None,
            finish_reason,
            None,
            seq.num_cached_tokens,
            seq.num_computed_tokens,
        )
        if finish_reason == "stop":
            output.stop_token_id = token_id
        else:
            seq.token_ids.append(token_id)
            output.token_ids.append(token_id)
            if token.logprobs is not None:
                output.logprobs = [token.logprobs]
        if finish_reason is not None:
            self.scheduler.finish(seq)
        return output

    def _fail(self, seqs: list[Sequence], error: Exception) -> list[SequenceOutput]:
        logger.error("a step failed, and with it %d sequences", len(seqs), exc_info=error)
        typed = error
        if not isinstance(typed, TandemError):
            typed = InternalError(f"the engine failed: {type(error).__name__}")
        for seq in seqs:
            self.scheduler.finish(seq)
        return [
            SequenceOutput(seq.request_id, [], finish_reason="error", error=typed) for seq in seqs
        ]
