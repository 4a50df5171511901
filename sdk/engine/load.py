"""Reports of an engine's load to routers."""

import asyncio
import contextlib
from collections.abc import Iterable
from functools import partial

from tandem.runtime.events import Events, load_subject
from tandem.runtime.messages import Instance, LoadReport, RoleName, encode
from tandem.runtime.tasks import keep_running
from tandem.sdk.engine.handler import EngineHandler
from tandem.sdk.engine.metrics import SnapshotPublisher
from tandem.sdk.engine.types import EngineConfig

_MOST_OFTEN_S = 0.05
_LEAST_OFTEN_S = 1.0


class LoadReporter:
    """A publisher of LoadReports: one after each change, and at least one a second.

    `changed` may be called from any thread, before `start` and after `close`.
    """

    def __init__(self) -> None:
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self.snapshots: SnapshotPublisher | None = None

    def changed(self) -> None:
        """Request a new report."""
        if self._loop is not None and not self._wake.is_set() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)

    def start(self, events: Events, sender: "Sender") -> None:
        """Publish reports until `close`."""
        self._loop = asyncio.get_running_loop()
        self._task = keep_running("the report of the load", partial(self._report, events, sender))

    async def close(self) -> None:
        """Stop; idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _report(self, events: Events, sender: "Sender") -> None:
        subject = load_subject(sender.instance.namespace, sender.instance.instance_id)
        while True:
            self._wake.clear()
            events.publish(subject, encode(sender.report(self.snapshots)))
            await asyncio.sleep(_MOST_OFTEN_S)
            # wait_for can lose a cancellation at the moment when `_wake` is set
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAST_OFTEN_S):
                    await self._wake.wait()


class Sender:
    """The instance under report, and the sources of its numbers."""

    def __init__(
        self, instance: Instance, role: RoleName, handler: EngineHandler, engine: EngineConfig
    ) -> None:
        self.instance = instance
        self._role = role
        self._handler = handler
        self._engine = engine

    def report(self, snapshots: SnapshotPublisher | None) -> LoadReport:
        """Return the current load. Requests beyond `max_num_seqs` count as waiting.

        Ranks compute side by side: prompts, answers and costs are those of one of them.
        """
        latest = [] if snapshots is None else list(snapshots.latest.values())
        num_blocks = sum(each.kv_total_blocks for each in latest)
        num_used = sum(each.kv_used_blocks for each in latest)
        if not latest:
            num_blocks = self._engine.total_kv_blocks or 0
        running = self._handler.num_running
        num_waiting = max(0, running - (self._engine.max_num_seqs or running))
        return LoadReport(
            instance_id=self.instance.instance_id,
            epoch=self.instance.epoch,
            role=self._role,
            num_running=running - num_waiting,
            num_waiting=num_waiting,
            num_waiting_tokens=_mean(each.num_waiting_tokens for each in latest),
            num_blocks=num_blocks,
            num_free_blocks=max(0, num_blocks - num_used),
            num_cached_blocks=0,
            num_decodes=_mean(each.num_decodes for each in latest),
            decode_context=_mean(each.decode_context for each in latest),
            costs=next((each.step_costs for each in latest if each.step_costs), None),
        )


def _mean(numbers: Iterable[int]) -> int:
    found = list(numbers)
    return round(sum(found) / len(found)) if found else 0
