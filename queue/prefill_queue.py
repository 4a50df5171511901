"""The prefill queue: tickets from decode workers, pulled by prefill workers.

The queue is a hint: a job may come twice, late or not at all, and the handoff allows for that.
Without the broker `publish` and `depth` fail at once; `receive` waits for its return.
"""

from dataclasses import dataclass
from typing import Protocol

from tandem.runtime.wire.handoff_messages import PrefillJob


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """Counts of the jobs on the queue now."""

    num_jobs: int  # waiting for a worker
    num_tokens: int  # uncached prompt tokens of all jobs that are not done: waiting or in progress
    num_in_progress: int  # delivered and not answered
    num_dead: int  # dead-lettered since the queue exists


class Delivery(Protocol):
    """One job in a worker's hands; `ack` or `give_back` ends it, and only the first counts.

    Neither raises: when an answer does not reach the broker, the broker delivers the job again.
    """

    @property
    def job(self) -> PrefillJob: ...

    @property
    def num_deliveries(self) -> int:
        """The number of deliveries so far, this one included, without those given back."""

    async def ack(self) -> None:
        """Remove the job from the queue."""

    async def give_back(self, delay_s: float = 0.0) -> None:
        """Offer the job anew, to any worker, without waiting for it.

        That is after the delay, or twice as long with each return of the job, within a limit. A job
        may be given back any number of times: only deliveries without an answer count as failures.
        """

    async def in_progress(self) -> None:
        """Restart the wait for an answer, for a job that takes longer."""


class PrefillQueue(Protocol):
    """A work queue of one namespace and model."""

    @property
    def connected(self) -> bool:
        """True when a `publish` may succeed now."""

    async def start(self) -> None:
        """Create the queue where it does not exist. Raise ServiceError."""

    async def publish(self, job: PrefillJob) -> None:
        """Put a job on the queue; the same (handoff, attempt) twice is one job.

        Raise ServiceError at once when the broker is known to be away or the queue is full, else
        within a second.
        """

    async def receive(self, max_jobs: int, timeout_s: float) -> list[Delivery]:
        """Wait for a first job, then take the others that wait. Empty after `timeout_s`.

        One caller at a time. After a cancellation the next call returns the job that was on its
        way.
        """

    async def depth(self) -> QueueDepth:
        """Return the counts. Raise ServiceError like `publish`."""

    async def stop_receiving(self) -> None:
        """Give back the jobs that were delivered and not returned, until the next `receive`."""

    async def close(self) -> None:
        """End as `stop_receiving` does, for good; jobs on the queue stay."""
