"""A request's state inside the engine, and the piece of it that one step computes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from tandem.runtime.messages import FinishReason, SamplingParams, StopConditions

if TYPE_CHECKING:
    import torch

# (number of layers, event): K/V of that many layers is in the pool once the event has happened.
OnLayers = Callable[[int, "torch.cuda.Event | None"], None]


class SequenceStatus(Enum):
    WAITING = "waiting"  # holds no blocks
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"  # holds its prompt's blocks and a seat
    RUNNING = "running"  # holds blocks for every token it has
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's tokens, blocks and progress. Only the engine thread changes it.

    `token_ids` is the prompt followed by what was generated; `block_table` maps a token's ordinal
    block (position // block_size) to a block id; positions below `num_computed_tokens` have K/V.
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
    num_cached_tokens: int = 0  # of those, taken from the prefix cache when it was scheduled
    block_hashes: list[bytes] = field(default_factory=list, repr=False)  # of leading full blocks
    num_published_blocks: int = 0  # leading blocks that the prefix cache has been told of
    num_reserved_cached_blocks: int = 0  # leading blocks of a reservation that are not filled
    stop_ids: frozenset[int] = frozenset()  # end of text and stop_token_ids, set when it is added

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def finish_reason_after(self, token_id: int) -> FinishReason | None:
        """Why the sequence would end if `token_id` were generated next; None: it goes on."""
        num_generated = len(self.token_ids) - self.num_prompt_tokens
        if token_id in self.stop_ids and num_generated >= self.stop.min_tokens:
            return "stop"
        return "length" if num_generated + 1 >= self.stop.max_tokens else None


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
