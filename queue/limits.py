"""The numbers that a ticket may hold: a stranger's are not acted on."""

from tandem.queue.config import QueueConfig
from tandem.runtime.wire.handoff_messages import PrefillJob

MAX_DEADLINE_MS = 3_600_000  # an hour


def flaw(job: PrefillJob, config: QueueConfig) -> str | None:
    """Return the reason why no worker of the cluster can have published a job; None for a job."""
    limits = (
        ("number of tokens", job.num_tokens, 1, config.max_job_tokens),
        ("number of uncached tokens", job.num_uncached_tokens, 0, config.max_job_tokens),
        ("deadline (ms)", job.deadline_ms, 1, MAX_DEADLINE_MS),
    )
    for name, number, least, most in limits:
        if not least <= number <= most:
            return f"its {name} is {number}, not {least} to {most}"
    return None
