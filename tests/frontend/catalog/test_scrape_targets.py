"""`GET /metrics/targets`: the processes that have metrics, for Prometheus' HTTP discovery."""

import socket

from msgspec.structs import replace

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.store.discovery import register_instance
from tandem.runtime.wire.cluster_messages import Instance
from tests.frontend.frontend_stack import Stack
from tests.services import eventually


async def register(stack: Stack, instance: Instance) -> None:
    await register_instance(stack.worker.discovery, instance)
    views = stack.server._targets._views
    await eventually(lambda: instance in [i for v in views for i in v.items.values()])


async def targets(stack: Stack) -> dict[str, dict[str, str]]:
    """The labels of each address."""
    answer = await stack.http.get("/metrics/targets")
    assert answer.headers["content-type"] == "application/json"
    return {group["targets"][0]: group["labels"] for group in answer.json()}


async def test_every_process_with_metrics_is_a_target_once_with_its_role(stack: Stack) -> None:
    first = stack.worker.instance()
    prefill = {"component": "prefill", "endpoint": "jobs"}
    for instance in (
        replace(first, metrics="10.0.0.1:9101"),
        replace(first, instance_id="p", metrics="10.0.0.2:9101", **prefill),
        replace(first, instance_id="b", metrics="[::1]:9101"),
        replace(first, instance_id="b", metrics="[::1]:9101", **prefill),
        replace(first, instance_id="silent", **prefill),
        replace(first, instance_id="f", component="frontend", address="https://10.0.0.4:443"),
    ):
        await register(stack, instance)
    assert await targets(stack) == {
        stack.server.address: {
            "__scheme__": "http", "role": "frontend", "instance_id": stack.server.instance_id,
        },
        "10.0.0.1:9101": {"role": "decode", "instance_id": first.instance_id},
        "10.0.0.2:9101": {"role": "prefill", "instance_id": "p"},
        "[::1]:9101": {"role": "both", "instance_id": "b"},
        "10.0.0.4:443": {"__scheme__": "https", "role": "frontend", "instance_id": "f"},
    }  # fmt: skip


async def test_a_worker_of_another_namespace_is_a_target_while_it_serves_a_model() -> None:
    async with Stack(num_workers=0) as stack:
        worker = await stack.add_worker(endpoint="mine.backend.generate", metrics="10.0.0.3:9101")
        await eventually(lambda: bool(stack.server.catalog.models))
        labels = {"role": "backend", "instance_id": worker.instance_id}
        assert (await targets(stack))["10.0.0.3:9101"] == labels
        await worker.leave()
        await eventually(lambda: not stack.server.catalog.models)
        assert list(await targets(stack)) == [stack.server.address]


def test_servers_on_all_addresses_are_reached_under_the_name_of_the_machine() -> None:
    assert RuntimeConfig(host="0.0.0.0").reachable_host == socket.gethostname()
    assert RuntimeConfig(host="10.0.0.9").reachable_host == "10.0.0.9"
    assert RuntimeConfig(host="0.0.0.0", advertise_host="gpu7").reachable_host == "gpu7"
