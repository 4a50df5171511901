"""Workers on three hosts that are 50 ms apart, on networks that lose a hundredth of all packets."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.e2e.host_cluster import PORTS, HostCluster
from tests.hosts import Hosts, require_hosts
from tests.services import eventually
from tests.stream_load import StreamLoad, ready_load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

DELAY_S = 0.025  # between a host and the bridge
NUM_ANSWERS = 30


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    require_hosts("nft")
    with Hosts(3, DELAY_S) as hosts:
        yield hosts


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    hosts: Hosts, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[HostCluster]:
    # many writes are given up while their bytes are on the way
    flags = "--transfer.write_timeout_s=0.3"
    async with HostCluster(hosts, tmp_path_factory.mktemp("far"), flags).running() as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def load(cluster: HostCluster) -> AsyncIterator[StreamLoad]:
    async with ready_load(lambda: cluster.url, "model") as load:
        yield load


async def test_a_connection_takes_as_long_as_the_way_there_and_back(cluster: HostCluster) -> None:
    port = int(PORTS.partition("-")[0])
    begun_s = time.perf_counter()
    _, writer = await asyncio.open_connection(cluster.hosts.all[0].address, port)
    took_s = time.perf_counter() - begun_s
    writer.close()
    assert took_s >= 2 * DELAY_S


async def test_hosts_that_are_far_apart_answer_as_near_ones_do(
    cluster: HostCluster, load: StreamLoad
) -> None:
    begun_s = time.perf_counter()
    for host in cluster.hosts.all:
        host.drop("numgen random mod 100 < 1 counter")
    async with load.running() as record:
        # 20 s beside three busy loops on two cores
        await eventually(lambda: record.num_right + len(record.wrong) >= NUM_ANSWERS, 200)
    print(f"{NUM_ANSWERS} answers in {time.perf_counter() - begun_s:.1f} s")
    record.judge("50 ms, loss")
    assert record.num_remote > 0
