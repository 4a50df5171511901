"""NATS and etcd as clusters of three, which lose their leaders under load."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tandem.runtime.errors import ServiceError
from tests.e2e.cluster import Cluster, write_sensitive_model
from tests.services import eventually
from tests.services_of_three import EtcdOfThree, NatsOfThree
from tests.stream_load import Record, StreamLoad, ready_load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]


class ClusterOfThrees(Cluster):
    """Roles that join three nats-servers and three etcds."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, write_sensitive_model(folder / "model"))
        self.three_nats, self.three_etcd = NatsOfThree(), EtcdOfThree()
        self.nats, self.etcd = self.three_nats, self.three_etcd  # type: ignore[assignment]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ClusterOfThrees]:
    cluster = ClusterOfThrees(tmp_path_factory.mktemp("three"))
    async with cluster:
        flags = (
            "--engine.max_model_len=512",
            "--engine.threads=1",
            "--disagg.claim_timeout_ms=20000",
        )
        await cluster.start_all(1, 2, *flags, "--disagg.policy=always_remote")
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def load(cluster: ClusterOfThrees) -> AsyncIterator[StreamLoad]:
    async with ready_load(lambda: cluster.base_url, "model") as load:
        yield load


async def until_more(record: Record, count: int) -> None:
    """Wait for so many answers more whose prompt the prefill worker computed."""
    num_remote = record.num_remote
    await eventually(lambda: record.num_remote >= num_remote + count)


@pytest.mark.parametrize(("part", "how"), [("", "killed"), ("tickets", "frozen")])
async def test_a_nats_cluster_that_loses_a_leader_costs_no_answer(
    cluster: ClusterOfThrees, load: StreamLoad, part: str, how: str
) -> None:
    nats, what = cluster.three_nats, part or "JetStream"
    await nats.until_whole()
    await eventually(lambda: nats.leader_of(part))
    leader = nats.leader_of(part)
    assert leader is not None
    async with load.running() as record:
        await until_more(record, 1)
        with nats.lost(leader, how):
            begun_s = time.perf_counter()
            await eventually(lambda: nats.leader_of(part, lost=leader))
            print(
                f"NATS, {what}, {how}: another leader after {time.perf_counter() - begun_s:.1f} s"
            )
            await until_more(record, 10)
            print(f"10 remote prompts after {time.perf_counter() - begun_s:.1f} s")
    record.judge(f"NATS, leader of {what} {how}")


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_an_etcd_cluster_that_loses_its_leader_costs_no_answer(
    cluster: ClusterOfThrees, load: StreamLoad, how: str
) -> None:
    async def takes_records() -> bool:
        try:
            await cluster.discovery.put_config("/tandem/test/probe", b"")
        except ServiceError:
            return False
        return True

    etcd = cluster.three_etcd
    await etcd.until_whole()
    async with load.running() as record:
        await eventually(lambda: etcd.leader)
        leader = etcd.leader
        assert leader is not None
        with etcd.lost(leader, how):
            begun_s = time.perf_counter()
            await eventually(takes_records)
            print(f"etcd, {how}: records are taken after {time.perf_counter() - begun_s:.1f} s")
            await cluster.start("decode2", "decode", "--engine.max_model_len=512")
            await cluster.registered("decode2")
            await until_more(record, 10)
            await cluster.end("decode2")
    record.judge(f"leader of etcd {how}")
