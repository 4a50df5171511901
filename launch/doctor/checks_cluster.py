"""Doctor's checks of a running cluster: bytes to every worker, and the links between workers."""

import asyncio
import time
from collections.abc import Iterator

from tandem.config.model import EffectiveConfig
from tandem.launch.cluster.status import ClusterReport, links, read_cluster
from tandem.runtime.address import new_id
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ServiceError, TandemError
from tandem.runtime.local.findings import Finding, fail, ok, warn
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.wire.cluster_messages import Instance

PAYLOAD_BYTES = 1 << 20  # far above a packet: a path that only passes small ones shows
CALL_TIMEOUT_S = 5.0


def check_cluster(effective: EffectiveConfig) -> Iterator[Finding]:
    """Yield a finding for every worker's request plane, and for every link between workers."""
    try:
        report = asyncio.run(read_cluster(effective))
    except ServiceError:
        return  # check_servers reports it
    yield from asyncio.run(_check_planes(effective, report))
    yield from _check_links(report)


async def _check_planes(effective: EffectiveConfig, report: ClusterReport) -> list[Finding]:
    by_address = {
        each.instance.address: each.instance
        for each in report.instances
        if each.instance.component != "frontend"
    }
    client = RequestClient(effective.config.runtime, new_id())
    try:
        return [await _check_plane(client, instance) for instance in by_address.values()]
    finally:
        await client.close()


async def _check_plane(client: RequestClient, instance: Instance) -> Finding:
    subject = f"worker {instance.instance_id[:8]} on {instance.host} at {instance.address}"
    begun_s = time.perf_counter()
    try:
        async with RequestContext(timeout_s=CALL_TIMEOUT_S) as context:
            await client.call(instance.address, "status", bytes(PAYLOAD_BYTES), context)
    except TandemError as error:
        return fail(
            subject,
            error.message,
            "let this host reach runtime.port_range there; give both the same cluster token and "
            "certificates",
        )
    took_ms = 1e3 * (time.perf_counter() - begun_s)
    return ok(subject, f"took {PAYLOAD_BYTES >> 20} MiB and answered after {took_ms:.0f} ms")


def _check_links(report: ClusterReport) -> Iterator[Finding]:
    """Yield the measurements of the links from running prefill workers to decode workers."""
    found = links(report)
    for line in found:
        yield ok("kv link", line)
    if not found and any(i.instance.component == "prefill" for i in report.instances):
        yield warn(
            "kv link",
            "no prefill worker is connected to a decode worker",
            "see `tandem status` and the workers' logs; between hosts, open transfer.port_range",
        )
