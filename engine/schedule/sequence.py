"""A request's state inside the engine, and the part of it that one step computes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from tandem.engine.schedule.windows import num_blocks_needed
from tandem.runtime.errors import CapacityError, ContextLengthError, InvalidRequestError
from tandem.runtime.wire.messages import FinishReason, SamplingParams, StopConditions
from tandem.runtime.wire.prompt_logprobs import PromptScores

if TYPE_CHECKING:
    import torch

    from tandem.engine.schedule.matcher import Matcher

# Stands in `token_ids` for the token that a launched step draws, until the step is collected.
PENDING = -1

# The most tokens of an answer that a grammar may add in one step, the drawn one among them.
MAX_FORCED_TOKENS = 32

# (number of layers, event): K/V of that many layers is in the pool once the event has happened.
OnLayers = Callable[[int, "torch.cuda.Event | None"], None]


class SequenceStatus(Enum):
    WAITING = "waiting"  # holds no blocks
    # Holds the blocks of its prompt; a row is kept free.
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"
    RUNNING = "running"  # holds a batch row and blocks for all its tokens
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's tokens, blocks and progress. Only the engine thread changes it.

    `token_ids` is the prompt, the generated tokens, and a PENDING for each token that a launched
    step draws, but for the last token of an answer, which no step computes. An answer that was
    begun elsewhere brings its tokens along. `block_table` maps a token's ordinal block
    (position // block_size) and a group of layers to a block id, as in block_tables: it is extended
    in place while the sequence runs, its blocks may be given back, and otherwise it is replaced.
    Positions below `num_computed_tokens` have K/V; those below
    `num_launched_tokens` will have it once the launched steps are collected.
    """

    request_id: str
    token_ids: list[int] = field(repr=False)
    num_prompt_tokens: int
    sampling: SamplingParams
    stop: StopConditions
    cache_salt: str = ""
    prefill_only: bool = False  # ends with its first token and keeps its blocks until it is dropped
    matcher: "Matcher | None" = None  # of the grammar that the answer follows
    # Called in the queue, once it has a batch row, and again as blocks come back until it returns
    # True: `reserve` may take the sequence from there. It does not start before.
    on_room: Callable[[], bool] | None = None
    num_layer_groups: int = 1  # groups that the last chunk of a prefill_only prompt is announced in
    status: SequenceStatus = SequenceStatus.WAITING
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_launched_tokens: int = 0
    in_flight: int = 0  # chunks of it in launched steps that are not collected
    batch_row: int = -1  # its own in [0, max_num_seqs) while it runs
    num_cached_tokens: int = 0  # computed ones that the prefix cache had when it was scheduled
    block_hashes: list[bytes] = field(default_factory=list, repr=False)  # of leading full blocks
    num_published_blocks: int = 0  # leading ordinal blocks published to the prefix cache
    num_passed_blocks: int = 0  # leading ordinal blocks that no window reads any more
    num_reserved_cached_blocks: int = 0  # leading entries of a reservation that the cache had
    stop_ids: frozenset[int] = frozenset()  # end of text and stop_token_ids, set by the engine
    num_given_tokens: int = field(init=False)  # prompt, and tokens generated elsewhere
    max_num_tokens: int = field(init=False)  # of prompt and answer, where "length" ends it
    # Of a prompt whose log probabilities are wanted, until they are in an output.
    prompt_scores: PromptScores | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.num_given_tokens = len(self.token_ids)
        self.max_num_tokens = (
            self.num_given_tokens + 1
            if self.prefill_only
            else self.num_prompt_tokens + self.stop.max_tokens
        )
        sampling = self.sampling
        if sampling.prompt_logprobs and sampling.logprobs is not None and not self.prefill_only:
            self.prompt_scores = PromptScores(sampling.logprobs)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_known_tokens(self) -> int:
        """The number of tokens before the first PENDING."""
        num_known = len(self.token_ids)
        while num_known and self.token_ids[num_known - 1] == PENDING:
            num_known -= 1
        return num_known

    def finish_reason_after(self, token_id: int) -> FinishReason | None:
        """Return why `token_id` would end the sequence if it came next. None: it would not."""
        return self.finish_reason_at(len(self.token_ids), token_id)

    def finish_reason_at(self, position: int, token_id: int) -> FinishReason | None:
        """Return why `token_id` at `position` of `token_ids` ends the sequence. None: it does not.

        A prefill_only sequence hands over its first token even if that is a stop token. A token
        beyond `max_num_tokens`, drawn where `max_tokens` is 0, is no part of the answer. A grammar
        gives a stop token before `min_tokens` where it allows no other token.
        """
        may_stop = (
            position - self.num_prompt_tokens >= self.stop.min_tokens or self.matcher is not None
        )
        is_within = position < self.max_num_tokens
        if token_id in self.stop_ids and is_within and may_stop and not self.prefill_only:
            return "stop"
        return "length" if position + 1 >= self.max_num_tokens else None


def check_limits(
    seq: Sequence, max_model_len: int, num_blocks: int, block_size: int, windows: tuple[int, ...]
) -> None:
    """Raise InvalidRequestError, ContextLengthError or CapacityError if `seq` can never run."""
    if not seq.token_ids:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    num_tokens = seq.max_num_tokens
    max_tokens = num_tokens - seq.num_prompt_tokens
    num_generated = seq.num_given_tokens - seq.num_prompt_tokens
    if not 0 <= num_generated < seq.num_given_tokens:
        raise InvalidRequestError(
            f"num_generated is {num_generated}, of {seq.num_given_tokens} tokens in all",
            param="num_generated",
        )
    if max_tokens < 0:
        raise InvalidRequestError(f"max_tokens is {max_tokens}, below 0", param="max_tokens")
    if num_generated and max_tokens <= num_generated:
        raise InvalidRequestError(
            f"the answer has its {max_tokens} tokens already: num_generated is {num_generated}",
            param="num_generated",
        )
    if num_tokens > max_model_len:
        raise ContextLengthError(
            f"the prompt has {seq.num_prompt_tokens} tokens and max_tokens is {max_tokens}: "
            f"{num_tokens} in all, the model takes {max_model_len}",
            param="max_tokens" if seq.num_prompt_tokens < max_model_len else "prompt",
        )
    num_needed = num_blocks_needed(windows, num_tokens, block_size)
    if num_needed > num_blocks:
        raise CapacityError(
            f"{num_tokens} tokens need {num_needed} KV blocks of {block_size}, "
            f"the pool has {num_blocks}"
        )


class Chunk(NamedTuple):
    """Tokens [start, end) of a sequence, computed in one step.

    `samples`: the logits at position end - 1 give the sequence's next token.
    """

    seq: Sequence
    start: int
    end: int
    samples: bool


def one_by_one(seq: Sequence, start: int, end: int) -> list[Chunk]:
    """Return a chunk for each token: all are computed as decodes, the last token samples."""
    last = len(seq.token_ids) - 1
    return [Chunk(seq, each, each + 1, each == last) for each in range(start, end)]


@dataclass(slots=True, frozen=True)
class LayerProgress:
    """K/V of layers below `num_layers`, of positions below `num_computed_tokens`, is in the pool.

    This holds once `event` has happened, or at once where it is None. No event is sent for the last
    group of layers: the sequence's output announces it.
    """

    request_id: str
    num_computed_tokens: int
    num_layers: int
    event: "torch.cuda.Event | None"


def layer_boundaries(num_layers: int, num_groups: int) -> tuple[int, ...]:
    """Return the end of each of `num_groups` even groups of layers; the last is `num_layers`.

    No group is empty, so there are at most `num_layers` of them, and at least one.
    """
    num_groups = max(1, min(num_groups, num_layers))
    return tuple(round(num_layers * (i + 1) / num_groups) for i in range(num_groups))
