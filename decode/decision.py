"""Where a prompt is prefilled, why, and the numbers that led to it. Pure."""

from enum import StrEnum

from msgspec import Struct

from tandem.decode.config import Policy
from tandem.router.predict import Prediction
from tandem.runtime.wire.messages import PrefillPlace


class PlacementCause(StrEnum):
    """The cause of a decision; the values are metric labels."""

    ASKED = "asked"
    PROMPT_LOGPROBS = "prompt_logprobs"
    POLICY = "policy"
    NO_PREFILL_WORKER = "no_prefill_worker"
    QUEUE_LOST = "queue_lost"
    SHORT = "short"
    QUEUE_FULL = "queue_full"
    LONG = "long"
    UNMEASURED = "unmeasured"
    FASTER = "faster"
    SLOWER = "slower"
    TARGET = "target"
    NO_BLOCKS = "no_blocks"
    SILENT = "silent"
    TRIED = "tried"
    FALLBACK = "fallback"  # a remote prefill was given up


_REASONS = {
    PlacementCause.ASKED: "asked for by the request",
    PlacementCause.PROMPT_LOGPROBS: "the prompt's log probabilities are wanted",
    PlacementCause.POLICY: "policy {0.policy}",
    PlacementCause.NO_PREFILL_WORKER: "no prefill worker",
    PlacementCause.QUEUE_LOST: "the prefill queue is not reachable",
    PlacementCause.SHORT: "uncached {0.num_uncached} <= max_local_prefill_length {0.limit}",
    PlacementCause.QUEUE_FULL: "queued {0.num_queued} >= max_prefill_queue_size {0.limit}",
    PlacementCause.LONG: "uncached {0.num_uncached} > max_local_prefill_length {0.limit}",
    PlacementCause.UNMEASURED: "{0.detail}; no step cost is known",
    PlacementCause.FASTER: "first token in {0.remote_ms:.1f} ms remote, {0.local_ms:.1f} local; "
    "all answers' delays {0.remote_cost_ms:.1f} against {0.local_cost_ms:.1f}",
    PlacementCause.SLOWER: "first token in {0.local_ms:.1f} ms local, {0.remote_ms:.1f} remote; "
    "all answers' delays {0.local_cost_ms:.1f} against {0.remote_cost_ms:.1f}",
    PlacementCause.TARGET: "only {0.place} keeps the targets: first token in {0.local_ms:.1f} ms "
    "local, {0.remote_ms:.1f} remote",
    PlacementCause.NO_BLOCKS: "too few free blocks to reserve now",
    PlacementCause.SILENT: "no prefill worker has reported its load lately",
    PlacementCause.TRIED: "tried, since costs that were learned may be old: first token in "
    "{0.local_ms:.1f} ms local, {0.remote_ms:.1f} remote",
    PlacementCause.FALLBACK: "remote failed: {0.detail}",
}

_PREDICTED = (
    PlacementCause.FASTER,
    PlacementCause.SLOWER,
    PlacementCause.TARGET,
    PlacementCause.TRIED,
)


class Decision(Struct, frozen=True, gc=False):
    """The place of a prompt's prefill, the cause, and the numbers that led to it."""

    place: PrefillPlace
    cause: PlacementCause
    policy: Policy | None = None
    num_uncached: int = 0  # tokens
    num_queued: int = 0  # jobs
    limit: int = 0  # the threshold that one of these numbers met
    local_ms: float = 0.0  # predicted, to the first token; 0: not known
    remote_ms: float = 0.0
    local_cost_ms: float = 0.0  # predicted delay of all answers together
    remote_cost_ms: float = 0.0
    claim_timeout_ms: float = 0.0  # of the ticket, then both are predicted anew; 0: as configured
    detail: str = ""  # of a remote prefill that was given up, or the rule where none is predicted
    ttft_target_ms: float | None = None  # in force
    itl_target_ms: float | None = None
    places: tuple[Prediction, ...] = ()  # that were predicted: this worker first, then others

    @property
    def predicted_ms(self) -> float:
        """The predicted time to the first token at the place; 0 when it is not known."""
        return self.local_ms if self.place == "local" else self.remote_ms

    @property
    def is_predicted(self) -> bool:
        """True when the predictions of both places decided."""
        return self.cause in _PREDICTED

    @property
    def reason(self) -> str:
        """The decision's cause and numbers as a sentence."""
        return _REASONS[self.cause].format(self)
