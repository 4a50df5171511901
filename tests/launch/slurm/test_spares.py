"""Nodes of a real Slurm that die, where a spare worker stands by for them, or nothing does."""

import time

import pytest

from tests.launch.slurm.slurm_deployment import Tandem
from tests.services import eventually
from tests.stream_load import StreamLoad

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]
NUM_HOSTS, NODE = 4, {"num_cpus": 1}  # one job on each
UP = ("--workers", "1", "--spare", "1", "--no-standby")


async def test_a_spare_worker_takes_the_answers_of_a_host_that_dies(
    tandem: Tandem, load: StreamLoad
) -> None:
    await tandem.until_serving(2)
    victim = next(iter(tandem.jobs().values()))
    async with load.running() as record:
        tandem.slurm.lose_node(victim)
        num_right = record.num_right
        await tandem.until_serving(1)
        await eventually(lambda: record.num_right > num_right + 30)
    record.judge("kill -9 of the host of the only worker but the spare one")
    assert max(record.pauses_s) < 12
    tandem.slurm.start_node(tandem.slurm.host(victim))
    await tandem.until_serving(2)


async def test_without_a_standby_the_services_come_back_as_soon_as_slurm_starts_their_job(
    tandem: Tandem, load: StreamLoad
) -> None:
    before = tandem.services()
    victim = tandem.host_of_services()
    async with load.running(hangs_up=True) as record:
        tandem.slurm.lose_node(victim)
        begun_s = time.perf_counter()
        await eventually(lambda: tandem.services() not in ({}, before), timeout_s=150, pause_s=0.2)
        await load.first_answer_s()
        print(f"without new requests on a lost host: {time.perf_counter() - begun_s:.1f} s")
    assert tandem.services()["job_id"] == before["job_id"]
    assert victim != tandem.host_of_services()
    assert record.num_right > 0 and not record.wrong, record.wrong[:2]
    async with load.running() as record:
        await tandem.until_serving(2)
        await eventually(lambda: record.num_remote > 0)  # each worker is on a host of its own
    record.judge("after the services moved")
