"""The prefill queue in one process, without a broker."""

import asyncio
import time
from dataclasses import dataclass

from tandem.queue.config import QueueConfig
from tandem.queue.limits import flaw
from tandem.queue.prefill_queue import Delivery, QueueDepth
from tandem.runtime.errors import ServiceError
from tandem.runtime.handoff_messages import PrefillJob
from tandem.runtime.tasks import ends_within


@dataclass(slots=True, eq=False)
class _Entry:
    job: PrefillJob
    visible_at: float  # perf_counter seconds
    expires_at: float
    num_delivered: int = 0
    in_progress: bool = False


class MemoryDelivery:
    """A job taken from a MemoryQueue."""

    def __init__(self, queue: "MemoryQueue", entry: _Entry) -> None:
        self._queue = queue
        self._entry = entry
        self._answered = False

    @property
    def job(self) -> PrefillJob:
        return self._entry.job

    @property
    def num_deliveries(self) -> int:
        return self._entry.num_delivered

    async def ack(self) -> None:
        if self._answer():
            self._queue.remove(self._entry)

    async def nak(self, delay_s: float = 0.0) -> None:
        if self._answer():
            self._queue.hide(self._entry, delay_s, in_progress=False)

    async def in_progress(self) -> None:
        if not self._answered:
            self._queue.hide(self._entry, self._queue.config.ack_wait_s, in_progress=True)

    def _answer(self) -> bool:
        first, self._answered = not self._answered, True
        return first


class MemoryQueue:
    """A PrefillQueue without a broker; decode and prefill side share the object."""

    def __init__(self, config: QueueConfig | None = None) -> None:
        self.config = config or QueueConfig()
        self.connected = True
        self._entries: list[_Entry] = []
        self._seen: dict[tuple[bytes, int], float] = {}  # |-> when it may come again
        self._num_dead = 0
        self._changed = asyncio.Event()

    async def start(self) -> None:
        self.connected = True

    async def publish(self, job: PrefillJob) -> None:
        if not self.connected:
            raise ServiceError("the prefill queue is away")
        now = time.perf_counter()
        self._seen = {key: until for key, until in self._seen.items() if until > now}
        if len(self._entries) >= self.config.max_jobs:
            raise ServiceError(f"the prefill queue is full: {self.config.max_jobs} jobs")
        key = (job.handoff_id, job.attempt)
        if key not in self._seen:
            self._seen[key] = now + self.config.max_age_s
            self._entries.append(_Entry(job, now, now + self.config.max_age_s))
            self._changed.set()

    async def receive(self, max_jobs: int, timeout_s: float) -> list[Delivery]:
        deadline = time.perf_counter() + timeout_s
        while True:
            self._changed.clear()
            taken = self._take(max_jobs)
            now = time.perf_counter()
            if taken or now >= deadline:
                return taken
            wake_at = min([deadline, *(entry.visible_at for entry in self._entries)])
            await ends_within(self._changed.wait(), max(wake_at - now, 0.0))

    async def depth(self) -> QueueDepth:
        if not self.connected:
            raise ServiceError("the prefill queue is away")
        self._expire()
        num_in_progress = sum(entry.in_progress for entry in self._entries)
        return QueueDepth(
            num_jobs=len(self._entries) - num_in_progress,
            num_tokens=sum(entry.job.num_uncached_tokens for entry in self._entries),
            num_in_progress=num_in_progress,
            num_dead=self._num_dead,
        )

    async def stop_receiving(self) -> None:
        pass  # it holds none

    async def close(self) -> None:
        self.connected = False

    def remove(self, entry: _Entry) -> None:
        """Forget a job that is done."""
        if entry in self._entries:
            self._entries.remove(entry)

    def hide(self, entry: _Entry, delay_s: float, *, in_progress: bool) -> None:
        """Deliver a job again, after `delay_s` at the earliest."""
        entry.visible_at = time.perf_counter() + delay_s
        entry.in_progress = in_progress
        self._changed.set()

    def _take(self, max_jobs: int) -> list[Delivery]:
        if not self.connected:
            return []
        self._expire()
        now = time.perf_counter()
        taken: list[Delivery] = []
        for entry in [entry for entry in self._entries if entry.visible_at <= now]:
            given_up = entry.num_delivered == self.config.max_deliver
            if given_up or flaw(entry.job, self.config) is not None:
                self._entries.remove(entry)
                self._num_dead += 1
            elif len(taken) < max_jobs:
                entry.num_delivered += 1
                self.hide(entry, self.config.ack_wait_s, in_progress=True)
                taken.append(MemoryDelivery(self, entry))
        return taken

    def _expire(self) -> None:
        now = time.perf_counter()
        self._entries = [entry for entry in self._entries if entry.expires_at > now]
