"""A request's state inside the engine, and the piece of it that one step computes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from tandem.runtime.messages import FinishReason, SamplingParams, StopConditions

if TYPE_CHECKING:
    import torch

# Stands in `token_ids` for the token that a launched step draws, until the step is collected.
PENDING = -1

# (number of layers, event): K/V of that many layers is in the pool once the event has happened.
OnLayers = Callable[[int, "torch.cuda.Event | None"], None]


class SequenceStatus(Enum):
    WAITING = "waiting"  # holds no blocks
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"  # holds its prompt's blocks; a seat is kept
    RUNNING = "running"  # holds a seat and blocks for every token it has
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's tokens, blocks and progress. Only the engine thread changes it.

    `token_ids` is the prompt followed by what was generated, and by PENDING for what launched steps
    draw; a last token of all is not awaited there, since no step computes it. It begins with more
    than its prompt where an answer goes on that was begun elsewhere. `block_table` maps a
    token's ordinal block (position // block_size) to a block id: it is extended in place while
    the sequence runs, and otherwise replaced. Positions below `num_computed_tokens` have K/V, those
    below `num_launched_tokens` will have it once the launched steps are collected.
    """

    request_id: str
    token_ids: list[int] = field(repr=False)
    num_prompt_tokens: int
    sampling: SamplingParams
    stop: StopConditions
    cache_salt: str = ""
    prefill_only: bool = False  # ends with its first token and keeps its blocks until released
    num_layer_groups: int = 1  # in how many the last chunk of a prefill_only prompt is announced
    status: SequenceStatus = SequenceStatus.WAITING
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_launched_tokens: int = 0
    in_flight: int = 0  # chunks of it in launched steps that are not collected
    seat: int = -1  # while it runs, its own index in [0, max_num_seqs)
    num_cached_tokens: int = 0  # of those, taken from the prefix cache when it was scheduled
    block_hashes: list[bytes] = field(default_factory=list, repr=False)  # of leading full blocks
    num_published_blocks: int = 0  # leading blocks that the prefix cache has been told of
    num_reserved_cached_blocks: int = 0  # leading blocks of a reservation that are not filled
    stop_ids: frozenset[int] = frozenset()  # end of text and stop_token_ids, set when it is added
    num_given_tokens: int = field(init=False)  # prompt, and what of the answer was said elsewhere
    max_num_tokens: int = field(init=False)  # of prompt and answer: where "length" ends it

    def __post_init__(self) -> None:
        self.num_given_tokens = len(self.token_ids)
        self.max_num_tokens = (
            self.num_given_tokens + 1
            if self.prefill_only
            else self.num_prompt_tokens + self.stop.max_tokens
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_known_tokens(self) -> int:
        """Of `token_ids`, those before the first PENDING."""
        num_known = len(self.token_ids)
        while num_known and self.token_ids[num_known - 1] == PENDING:
            num_known -= 1
        return num_known

    def finish_reason_after(self, token_id: int) -> FinishReason | None:
        """Why the sequence would end if `token_id` were generated next; None: it goes on."""
        return self.finish_reason_at(len(self.token_ids), token_id)

    def finish_reason_at(self, position: int, token_id: int) -> FinishReason | None:
        """Why the sequence ends with `token_id` at `position` of `token_ids`; None: it goes on.

        A prefill_only one hands over whatever its first token is.
        """
        may_stop = position - self.num_prompt_tokens >= self.stop.min_tokens
        if token_id in self.stop_ids and may_stop and not self.prefill_only:
            return "stop"
        return "length" if position + 1 >= self.max_num_tokens else None


class Chunk(NamedTuple):
    """Tokens [start, end) of a sequence, computed in one step.

    `samples`: the logits at position end - 1 give the sequence's next token.
    """

    seq: Sequence
    start: int
    end: int
    samples: bool


@dataclass(slots=True, frozen=True)
class LayerProgress:
    """K/V of layers below `num_layers`, of positions below `num_computed_tokens`, is in the pool.

    It is so once `event` has happened; None: it is so now. The last group of layers has no such
    news, its news is the sequence's output.
    """

    request_id: str
    num_computed_tokens: int
    num_layers: int
    event: "torch.cuda.Event | None"


def layer_boundaries(num_layers: int, num_groups: int) -> tuple[int, ...]:
    """Where each of `num_groups` even groups of layers ends: strictly increasing, to `num_layers`.

    No group is empty, so there are at most `num_layers` of them, and at least one.
    """
    num_groups = max(1, min(num_groups, num_layers))
    return tuple(round(num_layers * (i + 1) / num_groups) for i in range(num_groups))
