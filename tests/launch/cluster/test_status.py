"""The report of `tandem status` about workers, also those that do not answer."""

import asyncio
import socket

import msgspec
import pytest

from tandem.launch.cluster.status import _load_cells, notes, read_cluster, row_name
from tandem.runtime.address import EndpointAddress
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.membership.instance_report import InstanceReport
from tandem.runtime.membership.node import Node
from tandem.runtime.wire.cluster_messages import Instance, LoadReport, WorkerStatus
from tests.config.configs import config_of

INSTANCE = Instance("tandem", "decode", "generate", "0123456789abcdef", "127.0.0.1:1", "e1")
LOAD = LoadReport("0123456789abcdef", "e1", "decode", 0, 0, 0, 10, 10, 0)


def report(**details: str | int) -> InstanceReport:
    return InstanceReport(INSTANCE, "serving", WorkerStatus(INSTANCE, "serving", LOAD, details))


def test_quarantined_blocks_and_excluded_peers_are_pointed_out() -> None:
    first, second = notes(report(num_quarantined_blocks=4, excluded="fedcba98"))
    assert first.startswith("decode 01234567: 4 blocks in quarantine")
    assert "no KV from fedcba98" in second


def test_a_pool_is_shown_where_there_is_one() -> None:
    assert _load_cells(report().worker) == ["0", "0", "0 (0%)", "0", "10"]
    without = msgspec.structs.replace(LOAD, num_blocks=0, num_free_blocks=0, num_running=3)
    worker = WorkerStatus(INSTANCE, "serving", without)
    assert _load_cells(worker) == ["3", "0", "-", "-", "-"]
    assert _load_cells(None) == ["-"] * 5


def test_the_connector_of_an_engine_has_a_name_of_its_own_beside_its_worker() -> None:
    assert row_name(report()) == "decode"
    assert row_name(report(engine="vllm")) == "decode connector"


def test_a_worker_that_is_well_or_silent_needs_no_note() -> None:
    assert notes(report(num_quarantined_blocks=0, excluded="")) == []
    assert notes(report(late_share=0.04)) == []
    (late,) = notes(report(late_share=0.07))
    assert "steps are 7% late" in late and "--pace" in late
    assert notes(report()) == []
    assert notes(InstanceReport(INSTANCE, "no answer: lost")) == []


@pytest.mark.parametrize("component", ["decode", "prefill", "frontend"])
async def test_a_stopped_process_is_not_waited_for(
    component: str, runtime_config: RuntimeConfig
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # it accepts, and never answers
        host, port = stopped.getsockname()
        async with Node(runtime_config, component=component, model="m", serves=False) as node:
            address = EndpointAddress(runtime_config.namespace, component, "generate")
            key, at = address.instance_key(node.instance_id), f"{host}:{port}"
            await node.put(key, msgspec.json.encode(node.instance(address, at)))
            names = ("namespace", "nats_url", "etcd_endpoints")
            flags = [f"--runtime.{name}={getattr(runtime_config, name)}" for name in names]
            async with asyncio.timeout(60):  # it takes a second
                report = await read_cluster(config_of(*flags))
    [shown] = report.instances
    assert shown.state.startswith("no answer")
