"""The decode workers that a prefill worker connects to, and those that it leaves alone."""

import logging
from collections.abc import Iterable

import msgspec
import pytest

from tandem.prefill import worker as prefill_worker
from tandem.runtime.store.discovery import register_transfer
from tandem.runtime.wire.cluster_messages import TransferMetadata
from tests.prefill.decode_peer import Stage
from tests.services import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")  # as the stage's


async def announce(stage: Stage, instance_id: str, **changes: str) -> None:
    """Make a decode worker known; one that fits and follows it shows that it was considered."""
    metadata = msgspec.structs.replace(stage.metadata, instance_id=instance_id, **changes)
    await put(stage, metadata)
    await put(stage, msgspec.structs.replace(stage.metadata, address=f"after {instance_id}"))
    node_id = stage.peer.node.instance_id
    links = stage.worker._group.links
    await eventually(lambda: links[node_id].peer.address == f"after {instance_id}")


async def put(stage: Stage, metadata: TransferMetadata) -> None:
    node = stage.peer.node
    await register_transfer(node.discovery, node.config.namespace, metadata)


def warnings_about(records: Iterable[logging.LogRecord], name: str) -> list[str]:
    texts = [each.getMessage() for each in records if each.levelno >= logging.WARNING]
    return [text for text in texts if name in text]


async def test_the_decode_workers_of_another_model_are_left_alone(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    await announce(stage, "stranger", model="another", deployment="another", layout_hash="x")
    assert "stranger" not in stage.worker._group.links
    assert warnings_about(caplog.records, "stranger") == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout_hash": "x", "layout": "v2 layers=9"}, "layers=9"),
        ({"transport": "pigeon"}, "pigeon"),
        ({}, "other weights"),
    ],
)
async def test_a_decode_worker_that_does_not_fit_is_logged_once(
    stage: Stage,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    reason: str,
) -> None:
    monkeypatch.setattr(prefill_worker, "CONNECT_RETRY_S", 0.001)
    await announce(stage, "misfit", deployment="another", **changes)
    assert "misfit" not in stage.worker._group.links
    [warning] = warnings_about(caplog.records, "misfit")
    assert reason in warning


async def test_a_link_that_keeps_failing_is_logged_once(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_worker, "CONNECT_RETRY_S", 0.001)
    connect, attempts = stage.worker._group.connect, []

    async def counted(peer: TransferMetadata) -> object:
        if peer.instance_id == "broken":
            attempts.append(peer)
        return await connect(peer)

    monkeypatch.setattr(stage.worker._group, "connect", counted)
    await put(stage, msgspec.structs.replace(stage.metadata, instance_id="broken", num_blocks=0))
    await eventually(lambda: len(attempts) > 3)
    assert len(warnings_about(caplog.records, "broken")) == 1
