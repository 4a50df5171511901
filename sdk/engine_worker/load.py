"""Reports of an engine's load to routers."""

from collections.abc import Iterable

from tandem.runtime.bus.events import Events, load_subject
from tandem.runtime.wire.bounds import MAX_COUNT
from tandem.runtime.wire.cluster_messages import Instance, LoadReport, RoleName
from tandem.runtime.wire.messages import encode
from tandem.sdk.engine.metrics import SnapshotPublisher
from tandem.sdk.engine.types import EngineConfig
from tandem.sdk.engine_worker.handler import EngineHandler
from tandem.sdk.worker.changes import Changes

_PAUSE_S = 0.05


class EngineLoad:
    """The instance under report, and the sources of its numbers."""

    def __init__(
        self,
        instance: Instance,
        role: RoleName,
        handler: EngineHandler,
        engine: EngineConfig,
        snapshots: SnapshotPublisher | None,
    ) -> None:
        self._instance = instance
        self._role = role
        self._handler = handler
        self._engine = engine
        self._snapshots = snapshots

    async def publish(self, events: Events, changes: Changes) -> None:
        """Publish the load after each change, and at least once a second."""
        subject = load_subject(self._instance.namespace, self._instance.instance_id)
        async for _ in changes.reports(_PAUSE_S):
            events.publish(subject, encode(self.report()))

    def report(self) -> LoadReport:
        """Return the current load. Requests beyond `max_num_seqs` count as waiting.

        Ranks compute side by side: prompts, answers and costs are those of one of them. Numbers
        are cut to those that a report may have.
        """
        latest = [] if self._snapshots is None else list(self._snapshots.latest.values())
        num_blocks = sum(each.kv_total_blocks for each in latest)
        num_used = sum(each.kv_used_blocks for each in latest)
        if not latest:
            num_blocks = self._engine.total_kv_blocks or 0
        running = self._handler.num_running
        num_waiting = max(0, running - (self._engine.max_num_seqs or running))
        return LoadReport(
            instance_id=self._instance.instance_id,
            epoch=self._instance.epoch,
            role=self._role,
            num_running=_count(running - num_waiting),
            num_waiting=_count(num_waiting),
            num_waiting_tokens=_mean(each.num_waiting_tokens for each in latest),
            num_blocks=_count(num_blocks),
            num_free_blocks=_count(num_blocks - num_used),
            num_cached_blocks=0,
            num_decodes=_mean(each.num_decodes for each in latest),
            decode_context=_mean(each.decode_context for each in latest),
            costs=next((each.step_costs for each in latest if each.step_costs), None),
        )


def _count(number: int) -> int:
    return min(max(0, number), MAX_COUNT)


def _mean(numbers: Iterable[int]) -> int:
    found = list(numbers)
    return round(sum(found) / len(found)) if found else 0
