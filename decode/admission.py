"""Local or remote: who computes a prompt. Pure; the decode worker asks it for every request."""

import time
from dataclasses import dataclass, field

from tandem.decode.config import DisaggConfig, Policy
from tandem.runtime.messages import PrefillPlace

# A rate that nobody has confirmed for this long says nothing any more: the path is tried again.
RATE_LIFETIME_S = 30.0
RATE_SMOOTHING = 0.3  # weight of the newest measurement


@dataclass(slots=True)
class PrefillRate:
    """Seconds per uncached prompt token from arrival to a decodable prompt, as measured lately.

    Of long prompts only: what a request costs besides its tokens would drown that of short ones.
    """

    s_per_token: float | None = None
    measured_at: float = 0.0

    def observe(self, num_tokens: int, seconds: float, now: float | None = None) -> None:
        """Takes in one finished prefill of `num_tokens` uncached tokens."""
        now = time.perf_counter() if now is None else now
        sample = seconds / max(1, num_tokens)
        known = self.current(now)
        self.s_per_token = sample if known is None else known + RATE_SMOOTHING * (sample - known)
        self.measured_at = now

    def current(self, now: float) -> float | None:
        """The rate, or None when it was never measured or is too old to trust."""
        return None if now - self.measured_at > RATE_LIFETIME_S else self.s_per_token


@dataclass(slots=True)
class PrefillSide:
    """What a decode worker knows of the prefill side and of its own speed."""

    num_instances: int = 0
    queue_connected: bool = False
    num_queued_jobs: int = 0
    num_running: int = 0  # sequences decoding here, whose steps a local prefill lengthens
    local: PrefillRate = field(default_factory=PrefillRate)
    remote: PrefillRate = field(default_factory=PrefillRate)


@dataclass(slots=True, frozen=True)
class Decision:
    """Where a prompt is computed. `cause` is a metric label, `reason` a sentence with numbers."""

    place: PrefillPlace
    cause: str
    reason: str


def decide(
    config: DisaggConfig,
    num_uncached_tokens: int,
    side: PrefillSide,
    *,
    wish: PrefillPlace | None = None,
    now: float | None = None,
) -> Decision:
    """Where a prompt with `num_uncached_tokens` left to compute is prefilled.

    What cannot work comes first, then the caller's wish, then the policy.
    """
    if wish == "local":
        return Decision("local", "asked", "asked for by the request")
    if wish is None and config.policy == Policy.ALWAYS_LOCAL:
        return Decision("local", "policy", "policy always_local")
    if side.num_instances == 0:
        return Decision("local", "no_prefill_worker", "no prefill worker")
    if not side.queue_connected:
        return Decision("local", "queue_lost", "the prefill queue is not reachable")
    if wish == "remote":
        return Decision("remote", "asked", "asked for by the request")
    if config.policy == Policy.ALWAYS_REMOTE:
        return Decision("remote", "policy", "policy always_remote")
    decision = _by_threshold(config, num_uncached_tokens, side)
    if decision.place == "remote" and config.policy == Policy.ADAPTIVE:
        now = time.perf_counter() if now is None else now
        return _by_rates(decision, num_uncached_tokens, side, now)
    return decision


def _by_threshold(config: DisaggConfig, num_uncached: int, side: PrefillSide) -> Decision:
    length, queued = config.max_local_prefill_length, side.num_queued_jobs
    if num_uncached <= length:
        return Decision(
            "local", "short", f"uncached {num_uncached} <= max_local_prefill_length {length}"
        )
    if queued >= config.max_prefill_queue_size:
        limit = config.max_prefill_queue_size
        return Decision("local", "queue_full", f"queued {queued} >= max_prefill_queue_size {limit}")
    return Decision(
        "remote", "long", f"uncached {num_uncached} > max_local_prefill_length {length}"
    )


def _by_rates(remote: Decision, num_uncached: int, side: PrefillSide, now: float) -> Decision:
    local_rate, remote_rate = side.local.current(now), side.remote.current(now)
    if local_rate is None:
        return Decision("local", "unmeasured", "no long prompt was prefilled locally lately")
    if remote_rate is None:
        return remote  # nothing to compare with: it has to be tried
    # A local prefill is paid for twice while sequences decode: by the request itself and by
    # those whose steps it lengthens.
    local_ms = num_uncached * local_rate * 1e3 * (2 if side.num_running else 1)
    remote_ms = num_uncached * remote_rate * 1e3
    if remote_ms <= local_ms:
        return Decision(
            "remote",
            "faster",
            f"{remote.reason}; {remote_ms:.1f} ms remote <= {local_ms:.1f} local",
        )
    return Decision("local", "slower", f"expected {remote_ms:.1f} ms remote > {local_ms:.1f} local")
