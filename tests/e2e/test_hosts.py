"""Workers on three hosts, services on a fourth, TLS and firewalls: faults under load."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.e2e.host_cluster import FIREWALL, HostCluster
from tests.hosts import Hosts, end, require_hosts
from tests.services import eventually
from tests.stream_load import StreamLoad, ready_load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]

FAULT_S = 8.0
AFTER_S = 2.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    require_hosts("nft")
    with Hosts(3) as hosts:
        yield hosts


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    hosts: Hosts, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[HostCluster]:
    async with HostCluster(hosts, tmp_path_factory.mktemp("hosts")).running() as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def load(cluster: HostCluster) -> AsyncIterator[StreamLoad]:
    async with ready_load(lambda: cluster.url, "model") as load:
        yield load


async def test_workers_of_three_hosts_reach_one_another_through_their_firewalls(
    cluster: HostCluster, load: StreamLoad
) -> None:
    async def linked() -> bool:
        report = await cluster.report()
        workers = [each for each in (report.instances if report else []) if each.worker is not None]
        names = {each.instance.instance_id for each in workers}
        return len(names) == 3 and all(
            {link.decode_instance for link in each.worker.links if not link.is_broken}
            == names - {each.instance.instance_id}
            for each in workers
            if each.worker is not None
        )

    await eventually(linked, pause_s=0.2)
    report = await cluster.report()
    assert report is not None
    addresses = {each.instance.address.rpartition(":")[0] for each in report.instances}
    assert {host.address for host in cluster.hosts.all} <= addresses


async def test_doctor_sends_bytes_from_its_host_to_each_worker(cluster: HostCluster) -> None:
    text = await cluster.doctor(cluster.hosts.all[0])
    words = " ".join(text.split())
    for host in cluster.hosts.all:
        assert re.search(rf"{host.name} at {host.address}:\d+:? took 1 MiB", words), text
    assert "kv link" in words, text


async def test_by_default_short_prompts_are_computed_where_they_are_answered(
    cluster: HostCluster, load: StreamLoad
) -> None:
    await cluster.set_policy("adaptive")
    try:
        async with load.running() as record:
            await eventually(lambda: record.num_right >= 30)
        record.judge("the default")
    finally:
        await cluster.set_policy("always_remote")
    assert record.num_remote == 0 and len(record.why_local) == 1


@pytest.mark.parametrize("kind", ["two hosts", "a host and the services", "a host"])
async def test_a_network_that_fails_costs_no_answer(
    cluster: HostCluster, load: StreamLoad, kind: str
) -> None:
    one, other, _ = cluster.hosts.all
    async with load.running() as record:
        if kind == "two hosts":
            one.drop(f"ip saddr {other.address}")
            other.drop(f"ip saddr {one.address}")
        elif kind == "a host and the services":
            one.drop(f"ip saddr {cluster.hosts.address}")
        else:
            one.unplug()
        await asyncio.sleep(FAULT_S)
        one.plug()
        for host in cluster.hosts.all:
            host.heal()
            host.drop(FIREWALL)
        await asyncio.sleep(AFTER_S)
    record.judge(f"{kind}, {FAULT_S:g} s")
    assert record.num_remote > 0
    await cluster.until_serving(3)


async def test_a_host_that_vanishes_costs_no_answer(cluster: HostCluster, load: StreamLoad) -> None:
    victim = cluster.hosts.all[2]
    async with load.running() as record:
        victim.unplug()  # no farewell of its connections
        end(cluster.workers.pop(victim.name))
        begun_s = time.perf_counter()
        await eventually(cluster.has_forgotten_one, pause_s=0.2)
        print(f"gone from discovery after {time.perf_counter() - begun_s:.1f} s")
        await asyncio.sleep(AFTER_S)
    record.judge("a host that vanishes")
    assert record.num_remote > 0
    victim.plug()
    cluster.start(victim)
    await cluster.until_serving(3)
