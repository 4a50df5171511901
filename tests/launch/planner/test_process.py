"""The planner's process, beside workers that report a load and take changes of their role."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from tandem.config.model import EffectiveConfig
from tandem.launch.cluster.status import read_cluster
from tandem.launch.planner.executors import Executor, LocalExecutor
from tandem.launch.planner.planner import Change, Planner, Reading
from tandem.launch.planner.process import PlannerProcess
from tandem.runtime.address import EndpointAddress
from tandem.runtime.bus.events import load_subject
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ServiceError
from tandem.runtime.membership.node import Node
from tandem.runtime.plane.server import Responder
from tandem.runtime.store.discovery import config_key, register_instance, register_model
from tandem.runtime.store.planner_report import PlannerReport, decode_report, planner_prefix
from tandem.runtime.tasks import cancel
from tandem.runtime.wire.cluster_messages import (
    Instance,
    LoadReport,
    ModelCard,
    RoleChange,
    WorkerRole,
    WorkerStatus,
)
from tandem.runtime.wire.decoding import decoder
from tandem.runtime.wire.messages import encode
from tests.config.configs import config_of
from tests.launch.planner.test_planner import BLOCK_SIZE, report
from tests.services import eventually

_decode_change = decoder(RoleChange)


class ReportingWorker:
    """A worker of a cluster that computes nothing; `changes` are those that it was asked for."""

    def __init__(self, runtime: RuntimeConfig, role: WorkerRole, prompt_tokens: int) -> None:
        self.node = Node(runtime, component=role, model="m")
        self.node.deployment = "alike"
        self.role, self._prompt_tokens = role, prompt_tokens
        self.changes: list[WorkerRole] = []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["ReportingWorker"]:
        """Join the cluster and report a load four times a second."""
        async with self.node as node:
            node.server.register("change_role", self._change_role)
            address = EndpointAddress(node.config.namespace, self.role, "generate")
            await register_instance(node, node.instance(address))
            card = ModelCard("m", 4096, BLOCK_SIZE, 100, "digest", node.instance_id, 0)
            await register_model(node, node.config.namespace, card)
            reporting = asyncio.create_task(self._report())
            try:
                yield self
            finally:
                await cancel(reporting)

    async def _report(self) -> None:
        while True:
            self.node.events.publish(
                load_subject(self.node.config.namespace, self.node.instance_id),
                encode(self._load()),
            )
            await asyncio.sleep(0.05)

    def _load(self) -> LoadReport:
        tokens = self._prompt_tokens if self.role == "prefill" else 0
        return report(self.node.instance_id, self.role, prompt_tokens=tokens)

    async def _change_role(
        self, payload: bytes, context: RequestContext, responder: Responder
    ) -> None:
        self.role = _decode_change(payload).role
        self.changes.append(self.role)
        instance = self.node.instance(EndpointAddress("n", self.role, "generate"))
        responder.send(encode(WorkerStatus(instance, "serving", self._load())))


class FakeExecutor:
    """Notes what it is asked for. A start fails while `error` is set, and waits for `may_end`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.error = ""
        self.may_end = asyncio.Event()

    async def start(self, role: WorkerRole, count: int) -> str:
        self.asked.append(f"{role} {count}")
        if self.error:
            raise ServiceError(self.error)
        await self.may_end.wait()
        return "prefill-1"

    async def stop(self, worker: Instance) -> None:
        self.asked.append(worker.instance_id)


def effective_of(runtime: RuntimeConfig, mode: str = "advise", *more_flags: str) -> EffectiveConfig:
    token = runtime.cluster_token
    flags = [f"--runtime.cluster_token={token.get_secret_value()}"] if token else []
    if runtime.metrics_port is not None:
        flags.append(f"--runtime.metrics_port={runtime.metrics_port}")
    return config_of(
        f"--runtime.nats_url={runtime.nats_url}",
        f"--runtime.etcd_endpoints={runtime.etcd_endpoints}",
        f"--runtime.namespace={runtime.namespace}",
        f"--planner.mode={mode}",
        "--planner.interval_s=0.5",
        *flags,
        *more_flags,
    )


@asynccontextmanager
async def planned(
    runtime: RuntimeConfig,
    mode: str = "advise",
    *flags: str,
    executor: Executor | None = None,
) -> AsyncIterator[tuple[PlannerProcess, list[ReportingWorker]]]:
    """Run a planner beside one prefill worker with many prompts, and three idle decode workers.

    These have as many prompts once they take any.
    """
    async with AsyncExitStack() as stack:
        workers = [ReportingWorker(runtime, "prefill", 90_000)]
        workers += [ReportingWorker(runtime, "decode", 90_000) for _ in range(3)]
        for worker in workers:
            await stack.enter_async_context(worker.serving())
        planner = PlannerProcess(
            effective_of(runtime, mode, *flags), executor or LocalExecutor(runtime)
        )
        stack.push_async_callback(planner.stop)
        await planner.startup()
        yield planner, workers


async def reading_of(planner: PlannerProcess) -> PlannerReport:
    """Return the planner's record, once it has heard of all of `planned`'s workers."""
    prefix = planner_prefix(planner.node.config.namespace)
    found: list[PlannerReport] = []

    async def is_read() -> bool:
        records = await planner.node.discovery.get_prefix(prefix)
        found[:] = [each for each in map(decode_report, records.values()) if each.models]
        if not found:
            return False
        model = found[0].models[0]
        return model.num_prefill + model.num_generating == 4 and "full of prompts" in model.sentence

    await eventually(is_read)
    return found[0]


async def test_by_default_it_only_says_what_it_would_do(runtime_config: RuntimeConfig) -> None:
    async with planned(runtime_config) as (planner, workers):
        record = await reading_of(planner)
        assert record.mode == "advise"
        [model] = record.models
        assert (model.model, model.num_prefill, model.num_generating) == ("m", 1, 3)
        status = await read_cluster(effective_of(runtime_config))
        [line] = status.planners[0].lines
        assert line.startswith("planner (advise), m: 1 prefill workers are")
        assert not any(worker.changes for worker in workers)


async def test_what_it_advises_again_is_not_logged_again(
    runtime_config: RuntimeConfig,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, logger="tandem.launch.planner.process")
    advised: list[str] = []
    decide = Planner.decide

    def noted(*args: Any) -> Reading:
        reading = decide(*args)
        advised.extend([] if reading.change is None else [str(reading.change)])
        return reading

    monkeypatch.setattr(Planner, "decide", noted)
    async with planned(runtime_config):
        await eventually(lambda: len(advised) >= 2)
    assert len(set(advised)) == 1
    assert caplog.text.count("advised only") == 1


async def test_its_probe_is_ready_while_it_plans(runtime_config: RuntimeConfig) -> None:
    at_a_port = runtime_config.model_copy(update={"metrics_port": 0})
    planner = PlannerProcess(effective_of(at_a_port), LocalExecutor(at_a_port))
    try:
        await planner.startup()
        async with httpx.AsyncClient(base_url=f"http://{planner.node.metrics_address}") as http:
            assert (await http.get("/live")).status_code == 200
            assert (await http.get("/health")).status_code == 200
            await planner.node.withdraw()
            assert (await http.get("/health")).status_code == 503
    finally:
        await planner.stop()


async def test_it_moves_roles_once_it_may_and_explains_each_move(
    runtime_config: RuntimeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tandem.launch.planner.process")
    async with planned(runtime_config) as (planner, workers):
        await reading_of(planner)
        key = config_key(runtime_config.namespace, "planner.mode")
        await planner.node.discovery.put_config(key, b'"act"')
        await eventually(lambda: sum(worker.role == "prefill" for worker in workers) == 3)
        decoders = [worker for worker in workers if worker.role == "decode"]
        assert len(decoders) == 1  # the last one keeps its role
        assert sorted(worker.changes for worker in workers) == [[], [], ["prefill"], ["prefill"]]
        moved = [each.node.instance_id for each in workers if each.changes]
        for instance_id in moved:
            assert f"{instance_id} becomes prefill: " in caplog.text
        lines: list[str] = []

        async def is_told() -> bool:
            status = await read_cluster(effective_of(runtime_config, "act"))
            lines[:] = status.planners[0].lines
            return len(lines) == 2 and "3 prefill workers are" in lines[0]

        await eventually(is_told)
        assert lines[0].startswith("planner (act), m: ")
        assert lines[1].startswith("  last of 2 changes: ") and "would be" in lines[1]
        assert any(f"{each[:8]} to prefill" in lines[1] for each in moved)


async def last_line(planner: PlannerProcess) -> str:
    status = await read_cluster(planner._effective)
    return status.planners[0].lines[-1]


async def test_workers_start_once_no_role_helps_and_readings_go_on(
    runtime_config: RuntimeConfig,
) -> None:
    executor = FakeExecutor()
    async with planned(runtime_config, "act", "--planner.max_workers=5", executor=executor) as (
        planner,
        workers,
    ):
        await eventually(lambda: bool(executor.asked))
        assert executor.asked == ["prefill 1"]
        assert sum(worker.role == "prefill" for worker in workers) == 3

        async def is_read() -> bool:
            status = await read_cluster(planner._effective)
            return status.planners[0].lines[0].endswith("under way: start of 1, role prefill")

        await eventually(is_read)
        executor.may_end.set()

        async def is_told() -> bool:
            line = await last_line(planner)
            return line.startswith("  last of 3 changes: ") and "5 workers would be" in line

        await eventually(is_told)
    assert not planner._counting


async def test_a_start_that_fails_is_told_and_not_repeated_at_once(
    runtime_config: RuntimeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    executor = FakeExecutor()
    executor.error = "no GPU is left"
    async with planned(runtime_config, "act", "--planner.max_workers=5", executor=executor) as (
        planner,
        _,
    ):

        async def is_told() -> bool:
            status = await read_cluster(planner._effective)
            return status.planners[0].lines[0].endswith("the last change failed: no GPU is left")

        await eventually(is_told)
        assert executor.asked == ["prefill 1"]
        assert "m: start of 1, role prefill failed: no GPU is left" in caplog.text


async def test_without_a_supervisor_here_a_start_fails_in_a_sentence(
    runtime_config: RuntimeConfig,
) -> None:
    with pytest.raises(ServiceError, match="no `tandem serve` here runs this cluster"):
        await LocalExecutor(runtime_config).start("both", 1)


async def test_a_start_under_way_does_not_hold_up_the_end(runtime_config: RuntimeConfig) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    planner = PlannerProcess(effective_of(runtime_config), LocalExecutor(runtime_config))
    try:
        await planner.startup()
        start = asyncio.create_task(never())
        planner._counting["m", "alike"] = Change("", "both", "", "start"), start
        await planner.drain()
        assert start.cancelled()
    finally:
        await planner.stop()


async def test_of_two_planners_one_acts(runtime_config: RuntimeConfig) -> None:
    async with planned(runtime_config, "act") as (planner, _):
        effective = effective_of(runtime_config, "act")
        second = PlannerProcess(effective, LocalExecutor(runtime_config))
        try:
            await second.startup()
            both = (planner, second)
            await eventually(lambda: all(len(each._others.items) == 2 for each in both))
            assert sorted(each._acts for each in both) == [False, True]
        finally:
            await second.stop()
        await eventually(lambda: planner._acts)


async def test_a_planner_that_ends_leaves_no_record(runtime_config: RuntimeConfig) -> None:
    async with planned(runtime_config) as (planner, _):
        await reading_of(planner)
        await planner.drain()
        await planner.stop()
        status = await read_cluster(effective_of(runtime_config))
        assert status.planners == []
