"""Doctor sends bytes to every worker of a running cluster."""

import asyncio

from tandem.launch.doctor.checks_cluster import PAYLOAD_BYTES, check_cluster
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.plane.server import Responder
from tandem.runtime.process.lifecycle import started
from tandem.runtime.store.discovery import register_instance
from tandem.runtime.store.etcd import EtcdDiscovery
from tandem.runtime.wire.cluster_messages import Instance, LoadReport, WorkerStatus
from tandem.runtime.wire.messages import encode
from tests.config.configs import config_of
from tests.runtime.plane.ends import serving
from tests.services import free_port

LOAD = LoadReport("here", "epoch", "decode", 0, 0, 0, 9, 9, 0)


async def test_each_worker_gets_a_mebibyte_and_one_that_cannot_be_reached_is_named(
    runtime_config: RuntimeConfig,
) -> None:
    sizes: list[int] = []
    config = runtime_config

    def instance(name: str, address: str) -> Instance:
        return Instance(config.namespace, "decode", "generate", name, address, "epoch")

    async def status(payload: bytes, context: RequestContext, answer: Responder) -> None:
        sizes.append(len(payload))
        answer.send(encode(WorkerStatus(instance("here", server.address), "serving", LOAD)))

    effective = config_of(
        f"--runtime.namespace={config.namespace}",
        f"--runtime.nats_url={config.nats_url}",
        f"--runtime.etcd_endpoints={config.etcd_endpoints}",
    )
    nowhere = f"127.0.0.1:{free_port()}"
    async with (
        serving(config, {"status": status}) as server,
        started(EtcdDiscovery(config)) as discovery,
    ):
        await register_instance(discovery, instance("here", server.address))
        await register_instance(discovery, instance("away", nowhere))
        findings = await asyncio.to_thread(lambda: list(check_cluster(effective)))
    reached, lost = sorted(findings, key=lambda finding: finding.grade, reverse=True)
    assert (reached.grade, lost.grade) == ("ok", "fail")
    assert "worker here" in reached.subject and "took 1 MiB" in reached.detail
    assert "worker away" in lost.subject and nowhere in lost.detail
    assert "runtime.port_range" in lost.remedy
    assert PAYLOAD_BYTES in sizes
