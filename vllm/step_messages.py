"""The messages between the connector's two objects, which vLLM carries with each of its steps.

Handoffs are named by keys: at a decode worker the hexadecimal handoff id, at a prefill worker the
request id of the ticket's run.
"""

from dataclasses import dataclass, field

from tandem.decode.config import DisaggConfig


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
    """From the scheduler's object to the rank's, with one step."""

    offers: list[Offer] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)  # offers whose requests are over
    progress: list[Progress] = field(default_factory=list)
    over: list[str] = field(default_factory=list)  # tickets whose prompts vLLM has finished


@dataclass(slots=True)
class PrefillView:
    """The prefill workers and the thresholds, as the rank sees them."""

    thresholds: DisaggConfig
    num_instances: int = 0
    queue_connected: bool = False
    num_queued_jobs: int = 0


@dataclass(slots=True)
class News:
    """From the rank's object to the scheduler's, after one step.

    `failed` are the reasons of loads that were given up, by request. `quarantined` handoffs were
    given up while writes could still land; `released` ones have no write under way any more, in
    either direction.
    """

    view: PrefillView
    failed: dict[str, str] = field(default_factory=dict)
    quarantined: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    def aggregate(self, other: "News") -> "News":
        """Refuse, because the connector has one rank."""
        raise NotImplementedError("the connector serves one rank")
