"""The messages between the connector's two objects, which vLLM carries with each of its steps.

One more goes from the first rank to Tandem's engine of its process tree, which computes prompts.

Handoffs are named by keys, which all ranks share: at a decode worker the hexadecimal handoff id, at
a prefill worker the key of `tandem.vllm.prefill_side.TicketPrompt`.
"""

from collections import deque
from dataclasses import dataclass, field, replace

from tandem.decode.config import DisaggConfig
from tandem.runtime.wire.bounds import Message, Name, Payload

COMPUTE = "compute"  # the endpoint of the engine that answers once the prompt is computed


class ComputePrompt(Message, frozen=True):
    """A prompt to compute, for the ticket `key`; its KV stays in the engine's pool."""

    key: Name
    token_ids: Payload
    cache_salt: Name = ""


@dataclass(slots=True)
class Offer:
    """A prompt for the prefill workers; vLLM has its blocks already.

    The last token of the request's prompt is missing: vLLM computes it after the load.
    """

    key: str
    request_id: str
    token_ids: list[int]
    cache_salt: str
    num_cached_blocks: int
    block_ids: list[int]  # of the whole prompt


@dataclass(slots=True)
class Progress:
    """The KV of a ticket's prompt up to `num_tokens` is in these blocks after the step."""

    key: str
    num_tokens: int
    block_ids: list[int]


@dataclass(slots=True)
class Orders:
    """From the scheduler's object to those of all ranks, with one step."""

    offers: list[Offer] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)  # offers whose requests are over
    begun: list[str] = field(default_factory=list)  # tickets whose prompts vLLM has scheduled
    progress: list[Progress] = field(default_factory=list)
    over: list[str] = field(default_factory=list)  # tickets whose prompts vLLM has finished


@dataclass(slots=True)
class PrefillView:
    """The prefill workers and the thresholds, as a rank sees them."""

    thresholds: DisaggConfig
    num_instances: int = 0
    queue_connected: bool = False
    num_queued_jobs: int = 0
    max_prompt_tokens: int = 0  # of the instance that takes the longest prompts; 0: any


@dataclass(slots=True)
class LoadEnd:
    """vLLM gets the blocks of a request back: every one is proven, unless there is a `reason`.

    With a reason the prompt is computed anew. `quarantined`: the request is given up, or over, and
    writes may land until the key is released.
    """

    request_id: str
    key: str
    reason: str | None = None
    quarantined: bool = False


@dataclass(slots=True)
class Released:
    """No transfer of the handoff or of the ticket uses blocks of this process any more."""

    key: str


End = LoadEnd | Released
Ends = deque[End]  # from the connector's thread to that of vLLM's engine, in their order


@dataclass(slots=True)
class News:
    """From the objects of the ranks to the scheduler's, after one step."""

    view: PrefillView
    ends: dict[int, list[End]] = field(default_factory=dict)  # by rank

    def aggregate(self, other: "News") -> "News":
        """Return the news of both. `self` has the first rank's view of the queue."""
        num_instances = min(self.view.num_instances, other.view.num_instances)
        limits = [each.view.max_prompt_tokens for each in (self, other)]
        longest = min(filter(None, limits), default=0)
        view = replace(self.view, num_instances=num_instances, max_prompt_tokens=longest)
        return News(view, self.ends | other.ends)
