"""The decode role's config: thresholds, also set live by `tandem config set disagg.*`."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

# Live values reach every worker: no typing error may stop one, or hold a request for ever.
MAX_TOKENS = 1 << 28
MAX_TIMEOUT_MS = 3_600_000  # an hour


class Policy(StrEnum):
    """The policy of placing prompts. Live: takes effect with the next request."""

    ALWAYS_LOCAL = "always_local"
    ALWAYS_REMOTE = "always_remote"
    THRESHOLD = "threshold"
    ADAPTIVE = "adaptive"


class DisaggConfig(BaseModel):
    """Thresholds of disaggregation, and how long a remote prefill may take."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Policy = Field(
        Policy.ADAPTIVE,
        description="always_local | always_remote | threshold (length and queue) | adaptive "
        "(threshold, and only where it is predicted to delay all answers less)",
    )
    max_local_prefill_length: int = Field(
        1000,
        ge=0,
        le=MAX_TOKENS,
        description="uncached prompt tokens up to which a prompt is prefilled locally",
    )
    ttft_target_ms: float | None = Field(
        None,
        gt=0,
        le=MAX_TIMEOUT_MS,
        description="time to the first token that adaptive keeps where one of the places can, "
        "whatever the prompt's length (ms); none by default",
    )
    itl_target_ms: float | None = Field(
        None,
        gt=0,
        le=MAX_TIMEOUT_MS,
        description="longest time between two tokens that adaptive keeps where it can; it also "
        "shortens the steps of decode workers, and answers of workers of both roles stand together "
        "(ms); none by default",
    )
    max_prefill_queue_size: int = Field(
        2,
        ge=1,
        le=1_000_000,
        description="jobs waiting in the prefill queue at which prompts stay local, by policy "
        "threshold; adaptive predicts the wait instead",
    )
    handoff_timeout_ms: int = Field(
        10_000,
        ge=10,
        le=MAX_TIMEOUT_MS,
        description="time a remote prefill may take on top of its expected compute time; "
        "then the prompt is prefilled locally (ms)",
    )
    handoff_timeout_ms_per_token: float = Field(
        5.0,
        ge=0,
        le=10_000,
        description="added to handoff_timeout_ms for every uncached token (ms)",
    )
    claim_timeout_ms: int = Field(
        1000,
        ge=1,
        le=MAX_TIMEOUT_MS,
        description="time a ticket may wait in the queue unclaimed before the prompt is "
        "prefilled locally; adaptive waits longer where that is predicted to be better, and "
        "for no worker that has been silent for so long (ms)",
    )

    def handoff_timeout_of(self, num_uncached_tokens: int) -> int:
        """Return the milliseconds that a remote prefill of so many tokens may take.

        That is an hour at most: a queue takes no tickets with a later deadline.
        """
        tokens_ms = round(self.handoff_timeout_ms_per_token * num_uncached_tokens)
        return min(self.handoff_timeout_ms + tokens_ms, MAX_TIMEOUT_MS)
