"""The load reports of a decode worker, which last as long as its process."""

import threading

import msgspec
import pytest

from tandem.runtime.bus.events import load_subject
from tandem.runtime.wire.cluster_messages import LoadReport
from tests.decode.prefill_peer import Stage
from tests.services import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")  # as the stage's


async def test_an_unexpected_error_does_not_end_the_load_reports(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tandem.decode.worker.LOOK_INTERVAL_S", 0.02)
    monkeypatch.setattr("tandem.decode.worker.IDLE_LOOK_INTERVAL_S", 0.02)
    node = stage.process.node
    subject = load_subject(node.config.namespace, node.instance_id)
    reports: list[bytes] = []
    await node.events.subscribe(subject, lambda _, report: reports.append(report))

    async def fail() -> None:
        raise ValueError("a subject that is no number")

    with monkeypatch.context() as patch:
        patch.setattr(stage.worker.queue, "depth", fail)
        await eventually(lambda: "a subject that is no number" in caplog.text)
    reports.clear()
    await eventually(lambda: len(reports) >= 2)


async def test_prompts_that_come_during_a_step_are_reported_before_it_ends(stage: Stage) -> None:
    node, worker = stage.process.node, stage.process
    reports: list[LoadReport] = []
    await node.events.subscribe(
        load_subject(node.config.namespace, node.instance_id),
        lambda _, report: reports.append(msgspec.msgpack.decode(report, type=LoadReport)),
    )
    step_ends = threading.Event()
    worker.loop.post(lambda engine: step_ends.wait(60))
    try:
        worker.own_prompts.add("a", 700)
        worker.own_prompts.add("b", 300)
        await eventually(lambda: any(each.num_waiting_tokens == 1000 for each in reports))
        assert all(each.num_own_prompt_tokens == each.num_waiting_tokens for each in reports)
    finally:
        step_ends.set()
        worker.own_prompts.discard("a")
        worker.own_prompts.discard("b")
    reports.clear()
    await eventually(lambda: any(each.num_waiting_tokens == 0 for each in reports))
