"""The prefill queue: tickets from decode workers, pulled by prefill workers.

The queue is a hint, never the truth: a job may come twice, late or not at all, and the handoff
copes. Losing the broker fails `publish` and `depth` at once; `receive` waits for its return.
"""

from dataclasses import dataclass
from typing import Protocol

from tandem.runtime.messages import PrefillJob


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """What the queue holds right now."""

    num_jobs: int  # waiting for a worker
    num_tokens: int  # uncached prompt tokens of all jobs that are not done: waiting or in progress
    num_in_progress: int  # delivered and not answered
    num_dead: int  # given up, ever


class Delivery(Protocol):
    """One job in a worker's hands; `ack`, `nak` or `term` ends it, and only the first counts.

    None of them raises: an answer that the broker does not hear only means that the job comes
    again.
    """

    @property
    def job(self) -> PrefillJob: ...

    @property
    def num_delivered(self) -> int:
        """1 on the first delivery."""

    async def ack(self) -> None:
        """Done; the job leaves the queue."""

    async def nak(self, delay_s: float = 0.0) -> None:
        """Not now, not me: deliver it again, to anyone, after a delay."""

    async def in_progress(self) -> None:
        """Still working; restarts the wait for an answer."""

    async def term(self, reason: str) -> None:
        """Never again; the job becomes a dead letter."""


class PrefillQueue(Protocol):
    """A work queue of one namespace and model."""

    @property
    def connected(self) -> bool:
        """A publish could succeed now."""

    async def start(self) -> None:
        """Make the queue exist. Raises ServiceError."""

    async def publish(self, job: PrefillJob) -> None:
        """Put a job on the queue; the same (handoff, attempt) twice is one job.

        Raises ServiceError: at once when the broker is known to be away, else within a second.
        """

    async def receive(self, max_jobs: int, timeout_s: float) -> list[Delivery]:
        """Wait for a first job, then take what else is there. Empty after `timeout_s`.

        One caller at a time. May be cancelled: a job that was on its way comes first next time.
        """

    async def depth(self) -> QueueDepth:
        """Raises ServiceError like `publish`."""

    async def close(self) -> None:
        """Give back what was delivered and not taken; jobs on the queue stay."""
