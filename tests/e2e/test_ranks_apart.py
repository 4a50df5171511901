"""Workers whose ranks have a KV pool and a transfer agent each, as on GPUs, over real NIXL."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from tandem.worker.worker import EXIT_DEVICE_LOST
from tests.e2e.cluster import Cluster, write_sensitive_model
from tests.e2e.dying_rank import WHEN_VARIABLE
from tests.e2e.test_ranks import eight_times, prompt
from tests.services import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

APART = ("-m", "tests.e2e.apart_worker", "")
FLAGS = ("--engine.threads=1", "--disagg.claim_timeout_ms=20000")


@asynccontextmanager
async def decode_workers(folder: Path, num_kv_heads: int) -> AsyncIterator[Cluster]:
    """A decode worker of one rank and one of two."""
    model = write_sensitive_model(folder / "model", num_kv_heads)
    async with Cluster(folder, model) as cluster:
        await cluster.start("frontend", "frontend")
        await cluster.start("d1", "decode", *FLAGS)
        await cluster.start("d2", "decode", "--tp", "2", *FLAGS, entry=APART)
        await cluster.registered("d1", "d2")
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with decode_workers(tmp_path_factory.mktemp("cluster"), 2) as cluster:
        yield cluster


async def hand_over_between_all(cluster: Cluster) -> None:
    """Hand KV of a prefill worker of two ranks to each decode worker, and then that of one rank."""
    index = 0
    for flags, entry in ((("--tp", "2"), APART), ((), ("-m", "tandem.launch"))):
        await cluster.start("p", "prefill", *flags, *FLAGS, entry=entry)
        await cluster.ready(1, 2)
        were_handed_to: set[str] = set()
        while len(were_handed_to) < 2:
            index += 1
            answers = await eight_times(cluster, index)
            assert len({repr(answer.body["choices"]) for answer in answers}) == 1
            were_handed_to |= {
                answer.headers["x-tandem-decode-instance"]
                for answer in answers
                if answer.place == "remote"
            }
        await cluster.balanced()
        await cluster.end("p")


async def test_kv_goes_from_two_ranks_to_two_and_to_one_and_from_one_to_two(
    cluster: Cluster,
) -> None:
    await hand_over_between_all(cluster)


async def test_kv_of_one_head_that_two_ranks_have_goes_between_them_all(tmp_path: Path) -> None:
    async with decode_workers(tmp_path, num_kv_heads=1) as cluster:
        await hand_over_between_all(cluster)


@pytest.mark.parametrize("when", ["before", "after", "stops"])
async def test_a_rank_killed_or_stopped_in_a_handoff_ends_its_worker_and_the_answers_are_the_same(
    cluster: Cluster, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WHEN_VARIABLE, when)
    entry = ("-m", "tests.e2e.apart_worker", "tests.e2e.dying_rank")
    await cluster.start("p", "prefill", "--tp", "2", *FLAGS, entry=entry)
    await cluster.ready(1, 2)
    options = {"max_tokens": 16, "temperature": 0.8, "seed": 3, "cache_salt": when}

    async def ask(index: int, place: str) -> str:
        headers = {"x-tandem-prefill": place}
        answer = await cluster.complete(prompt(index, 90), **options, headers=headers)
        assert answer.status == 200, answer.body
        return answer.text

    remote = await asyncio.gather(*(ask(index, "remote") for index in range(6)))
    worker = cluster.children["p"]

    async def has_ended() -> bool:
        return worker.exit_code is not None

    await eventually(has_ended)
    reason, log = "was stopped" if when == "stops" else "was killed by SIGKILL", worker.log_tail()
    assert (worker.exit_code, reason in log) == (EXIT_DEVICE_LOST, True), log
    await cluster.balanced()
    await cluster.end("p")
    assert remote == await asyncio.gather(*(ask(index, "local") for index in range(6)))


async def test_no_rank_with_an_agent_outlives_its_killed_leader(cluster: Cluster) -> None:
    """The last test of the cluster."""
    leader = psutil.Process(cluster.children["d2"].pid)
    [follower] = leader.children()
    leader.kill()
    gone, _ = psutil.wait_procs([follower], timeout=30)
    assert gone == [follower]
    await cluster.end("d2")
