"""The decision for each prompt: prefill it locally or remotely. Pure."""

import time
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tandem.decode.config import DisaggConfig, Policy
from tandem.runtime.messages import PrefillPlace
from tandem.runtime.token_rate import TokenRate

# A rate without a new measurement for this long is not used any more: the path is tried again.
RATE_LIFETIME_S = 30.0
RATE_SMOOTHING = 0.3


def recent_rate() -> TokenRate:
    """Return a rate of seconds per uncached prompt token, from arrival to a decodable prompt.

    Only long prompts are measured: the fixed cost of a request would dominate that of short ones.
    """
    return TokenRate(RATE_SMOOTHING, RATE_LIFETIME_S)


@dataclass(slots=True)
class PrefillSide:
    """The state of the prefill side and the measured rates, as this decode worker knows them."""

    num_instances: int = 0
    queue_connected: bool = False
    num_queued_jobs: int = 0
    num_running: int = 0  # sequences decoding here, whose steps a local prefill lengthens
    local: TokenRate = field(default_factory=recent_rate)
    remote: TokenRate = field(default_factory=recent_rate)


class PlacementCause(StrEnum):
    """The cause of a decision; the values are metric labels."""

    ASKED = "asked"
    POLICY = "policy"
    NO_PREFILL_WORKER = "no_prefill_worker"
    QUEUE_LOST = "queue_lost"
    SHORT = "short"
    QUEUE_FULL = "queue_full"
    LONG = "long"
    UNMEASURED = "unmeasured"
    FASTER = "faster"
    SLOWER = "slower"
    NO_BLOCKS = "no_blocks"
    FALLBACK = "fallback"  # a remote prefill was given up


_REASONS = {
    PlacementCause.ASKED: "asked for by the request",
    PlacementCause.POLICY: "policy {0.policy}",
    PlacementCause.NO_PREFILL_WORKER: "no prefill worker",
    PlacementCause.QUEUE_LOST: "the prefill queue is not reachable",
    PlacementCause.SHORT: "uncached {0.num_uncached} <= max_local_prefill_length {0.limit}",
    PlacementCause.QUEUE_FULL: "queued {0.num_queued} >= max_prefill_queue_size {0.limit}",
    PlacementCause.LONG: "uncached {0.num_uncached} > max_local_prefill_length {0.limit}",
    PlacementCause.UNMEASURED: "no long prompt was prefilled locally lately",
    PlacementCause.FASTER: "uncached {0.num_uncached} > max_local_prefill_length {0.limit}; "
    "{0.remote_ms:.1f} ms remote <= {0.local_ms:.1f} local",
    PlacementCause.SLOWER: "expected {0.remote_ms:.1f} ms remote > {0.local_ms:.1f} local",
    PlacementCause.NO_BLOCKS: "too few free blocks to reserve now",
    PlacementCause.FALLBACK: "remote failed: {0.detail}",
}


@dataclass(slots=True, frozen=True)
class Decision:
    """The place of a prompt's prefill, the cause, and the numbers that led to it."""

    place: PrefillPlace
    cause: PlacementCause
    policy: Policy | None = None
    num_uncached: int = 0  # tokens
    num_queued: int = 0  # jobs
    limit: int = 0  # the threshold that one of these numbers met
    local_ms: float = 0.0  # expected
    remote_ms: float = 0.0
    detail: str = ""  # of a remote prefill that was given up

    @property
    def reason(self) -> str:
        """The decision's cause and numbers as a sentence."""
        return _REASONS[self.cause].format(self)


def decide(
    config: DisaggConfig,
    num_uncached_tokens: int,
    side: PrefillSide,
    *,
    placement: PrefillPlace | None = None,
    now: float | None = None,
) -> Decision:
    """Return the place for a prompt of `num_uncached_tokens` tokens that must be computed.

    Places that cannot work are excluded first; then the request's `placement` counts, then the
    policy.
    """
    if placement == "local":
        return Decision("local", PlacementCause.ASKED)
    if placement is None and config.policy == Policy.ALWAYS_LOCAL:
        return Decision("local", PlacementCause.POLICY, config.policy)
    if side.num_instances == 0:
        return Decision("local", PlacementCause.NO_PREFILL_WORKER)
    if not side.queue_connected:
        return Decision("local", PlacementCause.QUEUE_LOST)
    if placement == "remote":
        return Decision("remote", PlacementCause.ASKED)
    if config.policy == Policy.ALWAYS_REMOTE:
        return Decision("remote", PlacementCause.POLICY, config.policy)
    decision = _by_threshold(config, num_uncached_tokens, side)
    if decision.place == "remote" and config.policy == Policy.ADAPTIVE:
        return _by_rates(decision, side, time.perf_counter() if now is None else now)
    return decision


def _by_threshold(config: DisaggConfig, num_uncached: int, side: PrefillSide) -> Decision:
    decision = Decision(
        "local",
        PlacementCause.SHORT,
        config.policy,
        num_uncached,
        side.num_queued_jobs,
        config.max_local_prefill_length,
    )
    if num_uncached <= config.max_local_prefill_length:
        return decision
    if side.num_queued_jobs >= config.max_prefill_queue_size:
        limit = config.max_prefill_queue_size
        return replace(decision, cause=PlacementCause.QUEUE_FULL, limit=limit)
    return replace(decision, place="remote", cause=PlacementCause.LONG)


def _by_rates(remote: Decision, side: PrefillSide, now: float) -> Decision:
    local_rate, remote_rate = side.local.current(now), side.remote.current(now)
    if local_rate is None:
        return replace(remote, place="local", cause=PlacementCause.UNMEASURED)
    if remote_rate is None:
        return remote  # there is nothing to compare with before it was tried
    # While sequences decode, a local prefill costs twice: the request itself, and the sequences
    # whose steps it lengthens.
    local_ms = remote.num_uncached * local_rate * 1e3 * (2 if side.num_running else 1)
    remote_ms = remote.num_uncached * remote_rate * 1e3
    place: PrefillPlace = "remote" if remote_ms <= local_ms else "local"
    cause = PlacementCause.FASTER if place == "remote" else PlacementCause.SLOWER
    return replace(remote, place=place, cause=cause, local_ms=local_ms, remote_ms=remote_ms)
