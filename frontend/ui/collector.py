"""The collector of a frontend's page: one for all open pages, idle while none is open."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Iterator

import msgspec

from tandem.frontend.catalog.catalog import Catalog
from tandem.frontend.errors import TooManyRequestsError
from tandem.frontend.telemetry.metrics import FrontendMetrics
from tandem.frontend.ui.recent import Recent
from tandem.frontend.ui.state import PageState, QueueState, WorkerState, start_state, worker_state
from tandem.frontend.ui.window import Window
from tandem.router.idle import idle_prefill
from tandem.runtime.membership.instance_report import InstanceReport, ask_worker
from tandem.runtime.membership.node import Node
from tandem.runtime.store.discovery import TypedView, watch_instances
from tandem.runtime.store.planner_report import PlannerReport, watch_planners
from tandem.runtime.store.progress_report import ProgressReport, watch_progress
from tandem.runtime.wire.cluster_messages import Instance, WorkerStatus

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5  # between states; at most 5 in a second are promised
_CALL_TIMEOUT_S = 2.5  # below the time after which a worker counts as stopped
_KEEP_GONE_S = 300.0
_WORKERS = ("decode", "prefill")
_encode = msgspec.json.Encoder().encode


class _Followed:
    """A worker since it was first seen, with its last answer."""

    def __init__(self, instance: Instance) -> None:
        self.report = InstanceReport(instance, "not asked yet")
        self.last: WorkerStatus | None = None
        self.answered_s = time.perf_counter()
        self.is_gone = False
        self.asking: asyncio.Task[None] | None = None

    def state(self, now: float) -> WorkerState:
        silent_s = now - self.answered_s
        return worker_state(self.report, self.last, silent_s, is_gone=self.is_gone)


class Collector:
    """Asks the workers for their status, as `tandem status` does, and makes the states of pages."""

    def __init__(
        self,
        node: Node,
        catalog: Catalog,
        metrics: FrontendMetrics,
        recent: Recent,
        max_pages: int,
    ) -> None:
        self._node = node
        self._catalog = catalog
        self._recent = recent
        self.max_pages = max_pages
        self._window = Window(metrics, recent)
        self._num_pages = 0
        self._followed: dict[str, _Followed] = {}  # by instance id
        self._next: asyncio.Future[bytes] | None = None  # None: closed, or no page is open
        self._collecting: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def page(self) -> Iterator[None]:
        """Collect for one more page. Raise TooManyRequestsError when all are taken."""
        if self._num_pages >= self.max_pages:
            raise TooManyRequestsError(f"{self.max_pages} pages are open, and no more may be")
        self._num_pages += 1
        if self._collecting is None:
            self._next = asyncio.get_running_loop().create_future()
            self._recent.is_open = True
            self._collecting = asyncio.create_task(self._collect(), name="the states of pages")
        try:
            yield
        finally:
            self._num_pages -= 1
            if self._num_pages == 0:
                self._end()

    async def next_state(self) -> bytes:
        """Wait for the next state and return it as JSON; empty when no more will come."""
        return b"" if self._next is None else await asyncio.shield(self._next)

    async def close(self) -> None:
        """End the collection and all pages."""
        collecting = self._collecting
        self._end()
        if collecting is not None:
            await asyncio.gather(collecting, return_exceptions=True)

    def _end(self) -> None:
        if self._collecting is not None:
            self._collecting.cancel()
            self._collecting = None
        if self._next is not None:
            self._next.set_result(b"")
            self._next = None
        self._recent.is_open = False
        self._recent.clear()
        self._window.clear()
        for followed in self._followed.values():
            if followed.asking is not None:
                followed.asking.cancel()
        self._followed.clear()

    def worker(self, instance_id: str) -> Instance | None:
        """Return a worker that a page shows."""
        followed = self._followed.get(instance_id)
        return None if followed is None else followed.report.instance

    async def _collect(self) -> None:
        views: dict[str, list[TypedView[Instance]]] = {}
        progress: dict[str, TypedView[ProgressReport]] = {}
        planners: dict[str, TypedView[PlannerReport]] = {}
        try:
            while True:
                started_s = time.perf_counter()
                self._follow_namespaces(views, progress, planners)
                try:
                    state = await self._state(views, progress.values(), planners.values())
                    self._publish(state)
                except Exception:
                    logger.exception("no state of the page")
                await asyncio.sleep(max(0.0, INTERVAL_S - (time.perf_counter() - started_s)))
        finally:
            for view in [view for of_one in views.values() for view in of_one]:
                await view.close()
            for reports in progress.values():
                await reports.close()
            for of_planners in planners.values():
                await of_planners.close()

    def _publish(self, state: PageState) -> None:
        ready, self._next = self._next, asyncio.get_running_loop().create_future()
        if ready is not None:
            ready.set_result(_encode(state))

    def _follow_namespaces(
        self,
        views: dict[str, list[TypedView[Instance]]],
        progress: dict[str, TypedView[ProgressReport]],
        planners: dict[str, TypedView[PlannerReport]],
    ) -> None:
        """Follow the workers of this namespace, and those beside the workers of the catalog."""
        found = {instance.namespace for instance in self._catalog.instances.values()}
        for namespace in {self._node.config.namespace, *found} - views.keys():
            views[namespace] = [
                watch_instances(self._node.discovery, namespace, component)
                for component in _WORKERS
            ]
            progress[namespace] = watch_progress(self._node.discovery, namespace)
            planners[namespace] = watch_planners(self._node.discovery, namespace)

    async def _state(
        self,
        views: dict[str, list[TypedView[Instance]]],
        progress: Iterable[TypedView[ProgressReport]],
        planners: Iterable[TypedView[PlannerReport]],
    ) -> PageState:
        present = dict(self._catalog.instances)
        for view in [view for of_one in views.values() for view in of_one]:
            present |= view.items
        asking = [self._asking(instance) for instance in present.values()]
        if asking:  # a state does not wait for those that take longer
            await asyncio.wait(asking, timeout=INTERVAL_S / 2)
        now = time.perf_counter()
        for instance_id, followed in list(self._followed.items()):
            followed.is_gone = instance_id not in present
            if followed.is_gone and now - followed.answered_s > _KEEP_GONE_S:
                del self._followed[instance_id]
        decodes = self._decode_workers()
        thresholds = {worker.instance.model: _thresholds(worker) for worker in decodes}
        targets_ms = {
            model: {kind: _number(own.get(f"{kind}_target_ms")) for kind in ("ttft", "itl")}
            for model, own in thresholds.items()
        }
        window_s = self._window.update(now)
        return PageState(
            window_s=window_s,
            workers=[followed.state(now) for followed in self._followed.values()],
            starting=[start_state(*item) for view in progress for item in view.items.items()],
            queues=list(map(_queue, decodes)),
            planners=[
                line for view in planners for each in view.items.values() for line in each.lines
            ],
            idle_prefill=idle_prefill(self._present()),
            thresholds=thresholds,
            latencies=list(self._window.latencies(targets_ms)),
            placements=self._window.placements(),
            handoffs=list(self._recent.handoffs),
            begun=list(self._recent.begun),
        )

    def _asking(self, instance: Instance) -> asyncio.Task[None]:
        """Return the call to a worker that is under way, or a new one."""
        followed = self._followed.setdefault(instance.instance_id, _Followed(instance))
        if followed.asking is None or followed.asking.done():
            followed.asking = asyncio.create_task(self._ask(followed, instance))
        return followed.asking

    async def _ask(self, followed: _Followed, instance: Instance) -> None:
        report = await ask_worker(self._node.client, instance, _CALL_TIMEOUT_S)
        followed.report = report
        if report.worker is not None:
            followed.last, followed.answered_s = report.worker, time.perf_counter()

    def _present(self) -> list[WorkerStatus]:
        """Return the latest answer of each worker that has not left."""
        followed = self._followed.values()
        return [each.last for each in followed if each.last is not None and not each.is_gone]

    def _decode_workers(self) -> list[WorkerStatus]:
        """Return the latest answer of a decode worker of each deployment."""
        found: dict[tuple[str, str], WorkerStatus] = {}
        for followed in sorted(self._followed.values(), key=lambda each: each.answered_s):
            last = followed.last
            if last is not None and not followed.is_gone and "disagg.policy" in last.details:
                found[last.instance.model, last.instance.deployment] = last
        return list(found.values())


def _thresholds(worker: WorkerStatus) -> dict[str, str | int | float | bool]:
    """Return the live values of a decode worker by their names in `disagg`."""
    return {
        key.removeprefix("disagg."): value
        for key, value in worker.details.items()
        if key.startswith("disagg.")
    }


def _queue(worker: WorkerStatus) -> QueueState:
    counts = worker.count("num_queued_jobs"), worker.count("num_queued_tokens")
    return QueueState(worker.instance.model, worker.instance.deployment, *counts)


def _number(value: str | int | float | bool | None) -> float | None:
    return float(value) if isinstance(value, int | float) else None
