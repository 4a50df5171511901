"""The engine's results: outputs of sequences, reservations of blocks, and its load."""

import msgspec
from msgspec.structs import asdict

from tandem.engine.schedule.scheduler import Scheduler
from tandem.engine.schedule.sequence import Sequence
from tandem.runtime.errors import TandemError
from tandem.runtime.wire.bounds import MAX_COUNT
from tandem.runtime.wire.cluster_messages import (
    LoadReport,
    StepCosts,
    WorkerRole,
    positions_of,
)
from tandem.runtime.wire.messages import FinishReason, TokenLogprobs
from tandem.runtime.wire.prompt_logprobs import PromptLogprobs


class SequenceOutput(msgspec.Struct):
    """One sequence's result of one step. The output with a `finish_reason` is its last.

    A Struct, though it crosses no wire: hundreds are made per step, at a quarter of the cost.
    """

    request_id: str
    token_ids: list[int]
    # One per token id, if asked for; with log probabilities of the prompt the stop token's too.
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended it, which is not in token_ids
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0  # positions below have K/V; grows with each chunk of a prompt
    error: TandemError | None = None  # with finish_reason "error"
    prompt_logprobs: PromptLogprobs | None = None  # with the first token, if asked for
    seq: Sequence | None = None  # whose output it is: ids come again when a request is resumed


class Reservation(msgspec.Struct, frozen=True):
    """Blocks that a remote prefill fills. The engine owns them until the handoff has ended.

    Blocks that no later token reads, because a window has passed them, are in neither list.
    """

    fill: list[tuple[int, int]]  # (ordinal in the prompt's block table, block id)
    cached_ordinals: list[int]  # of the prompt's blocks that the prefix cache has
    num_cached_tokens: int


class Backlog(msgspec.Struct, frozen=True):
    """The part of the engine's load that delays a prompt."""

    num_waiting_tokens: int  # known tokens that no step has computed yet
    num_decodes: int = 0  # sequences past their prompt
    decode_context: int = 0  # tokens of these
    costs: StepCosts | None = None  # None: not learned yet
    num_running_prompt_tokens: int = 0  # of num_waiting_tokens: of prompts that have begun
    num_waiting_prompt_tokens: int = 0  # of num_waiting_tokens: of prompts that have not
    num_own_prompt_tokens: int = 0  # of num_waiting_tokens: of prompts that are answered here
    waiting_context: float = 0.0  # the positions of num_waiting_tokens, summed


class LoadStats(Backlog, frozen=True, kw_only=True):
    """The engine's load at one moment. Blocks held are those not free, cached or quarantined."""

    num_running: int
    num_waiting: int
    num_remote: int  # waiting for a remote prefill
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_quarantined_blocks: int
    num_preemptions: int  # since the start
    num_remote_prompt_tokens: int = 0  # of prompts that another worker computes
    num_groups: int = 1  # of layers: a sequence has a block in each for the same tokens
    max_num_seqs: int = 0  # batch rows

    def report(self, instance_id: str, epoch: str, role: WorkerRole) -> LoadReport:
        """Return the report for other workers; sequences in remote prefill count as waiting.

        Blocks are counted as those of sequences without windows: one for all groups of layers.
        """
        return LoadReport(
            instance_id=instance_id,
            epoch=epoch,
            role=role,
            num_running=self.num_running,
            num_waiting=self.num_waiting + self.num_remote,
            num_waiting_tokens=self.num_waiting_tokens,
            num_blocks=self.num_blocks // self.num_groups,
            num_free_blocks=self.num_free_blocks // self.num_groups,
            num_cached_blocks=self.num_cached_blocks // self.num_groups,
            num_decodes=self.num_decodes,
            decode_context=self.decode_context,
            costs=self.costs,
            max_num_seqs=self.max_num_seqs,
            num_own_prompt_tokens=self.num_own_prompt_tokens,
            waiting_context=min(int(self.waiting_context), MAX_COUNT),
        )


def backlog_of(scheduler: Scheduler, *, with_undecided: bool = False) -> Backlog:
    """Return the part of `load_of` that each decision about a prompt depends on.

    Prompts that may be computed elsewhere once they have room count only `with_undecided`.
    """
    num_waiting_tokens = num_own_prompt_tokens = squares = 0
    for seq in scheduler.waiting.values():
        if seq.on_room is not None and not with_undecided:
            continue
        num_tokens = len(seq.token_ids)
        num_waiting_tokens += num_tokens
        squares += num_tokens * num_tokens
        if not seq.prefill_only:
            num_own_prompt_tokens += num_tokens
    waiting_context = squares / 2  # as `positions_of` counts, which is slower for each of many
    num_waiting_prompt_tokens = num_waiting_tokens
    num_running_prompt_tokens = num_decodes = decode_context = 0
    for seq in scheduler.running.values():
        num_known = seq.num_known_tokens
        num_left = num_known - seq.num_computed_tokens
        num_waiting_tokens += num_left
        if num_left <= 1:
            num_decodes += 1
            decode_context += num_known
        else:
            num_running_prompt_tokens += num_left
            num_own_prompt_tokens += 0 if seq.prefill_only else num_left
            waiting_context += positions_of(num_left, seq.num_computed_tokens)
    return Backlog(
        num_waiting_tokens,
        num_decodes,
        decode_context,
        _step_costs(scheduler),
        num_running_prompt_tokens,
        num_waiting_prompt_tokens,
        num_own_prompt_tokens,
        waiting_context,
    )


def load_of(scheduler: Scheduler) -> LoadStats:
    """Return the load of the engine that `scheduler` belongs to."""
    pool = scheduler.pool
    return LoadStats(
        **asdict(backlog_of(scheduler, with_undecided=True)),
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_remote=len(scheduler.remote),
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free,
        num_cached_blocks=pool.num_cached,
        num_quarantined_blocks=pool.num_quarantined,
        num_preemptions=scheduler.num_preemptions,
        num_remote_prompt_tokens=sum(len(seq.token_ids) for seq in scheduler.remote.values()),
        num_groups=pool.num_groups,
        max_num_seqs=scheduler.max_num_seqs,
    )


def _step_costs(scheduler: Scheduler) -> StepCosts | None:
    """Return the learned cost of steps; None before a prompt was computed."""
    cost = scheduler.step_cost
    if not any(cost.prompt_s):
        return None
    return StepCosts(
        cost.decode_s,
        cost.prompt_s,
        cost.max_step_s,
        scheduler.max_num_batched_tokens,
        min(scheduler.prefill_chunk_tokens, scheduler.max_num_batched_tokens),
        cost.has_target,
        cost.ttft_target_s,
        cost.hidden_share,
        cost.floor_s,
        cost.tile_tokens,
        cost.longest_local,
    )
