"""`tandem planner`: a process that follows the workers and changes their roles and their number."""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from typing import Any

import msgspec

from tandem.config.model import EffectiveConfig
from tandem.config.planner import Mode
from tandem.launch.cluster.one_worker import change_role
from tandem.launch.planner.executors import Executor, LocalExecutor
from tandem.launch.planner.planner import Change, Planner, Reading
from tandem.queue.jetstream import JetStreamQueue
from tandem.runtime.bus.events import load_subject
from tandem.runtime.errors import ProtocolError, ServiceError, TandemError
from tandem.runtime.membership.node import Node
from tandem.runtime.process.lifecycle import Lifecycle
from tandem.runtime.process.logs import setup_logging
from tandem.runtime.store.discovery import (
    TypedView,
    WatchView,
    config_prefix,
    watch_instances,
    watch_models,
)
from tandem.runtime.store.live_config import LiveSection
from tandem.runtime.store.planner_report import (
    PlannedModel,
    PlannerReport,
    planner_prefix,
    watch_planners,
)
from tandem.runtime.tasks import cancel, keep_running
from tandem.runtime.wire.cluster_messages import Instance, LoadReport
from tandem.runtime.wire.decoding import RefusalLog, decoder

logger = logging.getLogger(__name__)

_decode_load = decoder(LoadReport)
_refusals = RefusalLog(logger, "a load report")
Deployment = tuple[str, str]  # of a model: its name, and the id of alike workers


async def run_planner(effective: EffectiveConfig, executor: Executor | None = None) -> None:
    """Plan until a signal ends the process. Raise ServiceError without NATS and etcd.

    Without an executor the `tandem serve` of this machine starts and ends workers.
    """
    runtime = effective.config.runtime
    setup_logging(runtime.log_level, "planner", format=runtime.log_format)
    planner = PlannerProcess(effective, executor or LocalExecutor(runtime))
    lifecycle = Lifecycle(drain_timeout_s=runtime.drain_timeout_s)
    await lifecycle.run(startup=planner.startup, drain=planner.drain, stop=planner.stop)


class PlannerProcess:
    """A planner of every deployment of a namespace. One role changes at a time.

    A worker that starts or drains may take minutes; readings go on, without another change.
    """

    def __init__(self, effective: EffectiveConfig, executor: Executor) -> None:
        self._effective, config = effective, effective.config
        self._namespace = config.runtime.namespace
        self.node = Node(config.runtime, component="planner", serves=False, has_probes=True)
        self._executor = executor
        self._planners: dict[Deployment, Planner] = {}
        self._counting: dict[Deployment, tuple[Change, asyncio.Task[None]]] = {}
        self._shown: dict[Deployment, PlannedModel] = {}
        self._advised: dict[Deployment, str] = {}  # the last change, while it would be right
        self._planning: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()

    # ---- lifecycle ------------------------------------------------------------------------

    async def startup(self) -> None:
        """Join the cluster and begin."""
        stack, node = self._stack, self.node
        stack.push_async_callback(node.close)
        await node.connect()
        discovery = node.discovery
        config = discovery.watch(config_prefix(self._namespace))
        self._instances = [
            watch_instances(discovery, self._namespace, component)
            for component in ("decode", "prefill")
        ]
        self._cards = watch_models(discovery, self._namespace)
        self._others = watch_planners(discovery, self._namespace)
        views: list[WatchView | TypedView[Any]] = [config, *self._instances]
        for view in (*views, self._cards, self._others):
            stack.push_async_callback(view.close)
            await view.ready()
        base = self._effective.config.planner
        self._live = LiveSection("planner", base, config, self._namespace, "")
        stop = await node.events.subscribe(load_subject(self._namespace), self._on_load)
        stack.push_async_callback(stop)
        await self._put_report()
        self._planning = keep_running("the planner", self._plan)
        stack.push_async_callback(self._stop_planning)
        logger.info("planner %s of namespace %s: %s", node.instance_id, self._namespace, base.mode)

    async def drain(self) -> None:
        """Begin no change; a role under way changes before, a worker starts or ends without us."""
        async with self._changing:
            await self._stop_planning()

    async def stop(self) -> None:
        """Leave the cluster."""
        await self._stack.aclose()

    async def _stop_planning(self) -> None:
        await cancel(self._planning)
        for _, task in list(self._counting.values()):
            await cancel(task)

    # ---- the workers ----------------------------------------------------------------------

    def _workers(self) -> dict[Deployment, dict[str, Instance]]:
        """Return the workers of each deployment by id."""
        found: dict[Deployment, dict[str, Instance]] = defaultdict(dict)
        for view in self._instances:
            for instance in view.items.values():
                if instance.deployment:
                    found[instance.model, instance.deployment][instance.instance_id] = instance
        return found

    def _block_size(self, workers: dict[str, Instance]) -> int | None:
        """Return the tokens of a block; None before a worker has put its card."""
        sizes = (
            each.block_size for each in self._cards.items.values() if each.instance_id in workers
        )
        return next(sizes, None)

    def _on_load(self, subject: str, payload: bytes) -> None:
        try:
            report = _decode_load(payload)
        except ProtocolError as error:
            _refusals.note(subject, error)
            return
        for view in self._instances:
            instance = view.items.get(report.instance_id)
            planner = (
                self._planners.get((instance.model, instance.deployment)) if instance else None
            )
            if planner is not None:
                planner.reported(report, time.perf_counter())
                return

    # ---- plans ----------------------------------------------------------------------------

    async def _plan(self) -> None:
        """Decide for each deployment, and wait until the next decision is due."""
        await asyncio.sleep(self._live.current.interval_s)
        workers = self._workers()
        for gone in self._planners.keys() - workers.keys():
            del self._planners[gone]
            self._shown.pop(gone, None)
            self._advised.pop(gone, None)
        for deployment, instances in sorted(workers.items()):
            block_size = self._block_size(instances)
            if block_size is None:
                continue
            planner = self._planners.get(deployment)
            if planner is None:
                planner = self._planners[deployment] = Planner(self._live.current, block_size)
            planner.config = self._live.current
            planner.keep(instances)
            await self._decide(deployment, planner)
        await self._put_report()

    async def _decide(self, deployment: Deployment, planner: Planner) -> None:
        try:
            num_tokens = await self._num_ticket_tokens(deployment)
        except (ServiceError, ProtocolError) as error:
            logger.warning("no plan for %s: its prefill queue: %s", deployment[0], error)
            return
        change, _ = self._counting.get(deployment, (None, None))
        reading = planner.decide(num_tokens, time.perf_counter(), change)
        self._show(deployment, reading)
        advised = self._advised.pop(deployment, "")
        if reading.change is None:
            return
        if not self._acts:
            self._advised[deployment] = str(reading.change)
            if str(reading.change) != advised:
                logger.info("%s, advised only: %s", deployment[0], reading.sentence)
        elif reading.change.kind == "role":
            if await self._change(reading.change):
                self._show(deployment, reading, has_changed=True)
        else:
            task = asyncio.create_task(self._change_count(deployment, reading, reading.change))
            self._counting[deployment] = reading.change, task

    def _show(self, deployment: Deployment, reading: Reading, *, has_changed: bool = False) -> None:
        """Keep a reading for the record; one after whose change it is the last of them."""
        shown = self._shown.get(deployment)
        num_changes, last = (shown.num_changes, shown.last_change) if shown else (0, "")
        if has_changed:
            num_changes, last = num_changes + 1, reading.sentence
        model, group = deployment
        self._shown[deployment] = PlannedModel(
            model=model,
            deployment=group,
            num_prefill=reading.num_prefill,
            num_generating=reading.num_generating,
            sentence=reading.sentence,
            num_changes=num_changes,
            last_change=last,
        )

    async def _num_ticket_tokens(self, deployment: Deployment) -> int:
        config, nats = self._effective.config.queue, self.node.nats
        queue = JetStreamQueue(nats, config, self._namespace, *deployment)
        return (await queue.depth()).num_tokens

    @property
    def _acts(self) -> bool:
        """True where the config says so, and no planner with a smaller id is there."""
        first = min(self._others.items, default=self.node.instance_id)
        return self._live.current.mode == "act" and first >= self.node.instance_id

    async def _change(self, change: Change) -> bool:
        """Change a role; False where the worker refused or could not."""
        async with self._changing:
            logger.info("%s becomes %s: %s", change.instance_id, change.role, change.reason)
            try:
                await change_role(self._effective, change.instance_id, change.role)
            except TandemError as error:
                logger.warning("%s does not become %s: %s", change.instance_id, change.role, error)
                return False
            return True

    async def _change_count(self, deployment: Deployment, reading: Reading, change: Change) -> None:
        """Start or end a worker; a failure is in the log and in the readings that follow."""
        error = ""
        logger.info("%s: %s", deployment[0], reading.sentence)
        try:
            if change.kind == "start":
                names = await self._executor.start(change.role, change.count)
                logger.info("started: %s", names)
            elif worker := self._workers().get(deployment, {}).get(change.instance_id):
                await self._executor.stop(worker)
                logger.info("%s has ended", change.instance_id)
            self._show(deployment, reading, has_changed=True)
        except TandemError as failure:
            error = str(failure)
            logger.warning("%s: %s failed: %s", deployment[0], change, error)
        finally:
            del self._counting[deployment]
        if (planner := self._planners.get(deployment)) is not None:
            planner.counts.ended(time.perf_counter(), error)

    async def _put_report(self) -> None:
        mode: Mode = "act" if self._acts else "advise"
        report = PlannerReport(self.node.instance_id, mode, list(self._shown.values()))
        key = planner_prefix(self._namespace) + self.node.instance_id
        await self.node.put(key, msgspec.json.encode(report))
