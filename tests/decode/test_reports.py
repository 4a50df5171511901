"""The load reports of a decode worker, which last as long as its process."""

import pytest

from tandem.runtime.events import load_subject
from tests.decode.prefill_peer import Stage
from tests.services import eventually


async def test_an_unexpected_error_does_not_end_the_load_reports(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
