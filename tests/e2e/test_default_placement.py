"""The places of prompts as a user meets them: nothing is forced, and every start is a fresh one.

Emulated devices keep their pace however busy the host is, so that a load has a clear answer there.
Workers that compute on cores that they share may learn anything about each other: their prompts go
where the predictions say, whatever these are.
"""

import asyncio
import contextlib
import random
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from tandem.config.topology import TOPOLOGIES
from tandem.decode.admission import MIN_GAIN
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import UnavailableError
from tandem.runtime.wire.cluster_messages import RoleChange, WorkerStatus
from tandem.runtime.wire.messages import encode
from tests.e2e.cluster import Cluster
from tests.e2e.serving import serving

NUM_ANSWERS = 16  # that run all the time: a prompt beside them delays each
NUM_PROMPTS = 8
LONG, SHORT = 1500, 200  # tokens; disagg.max_local_prefill_length is 1000
READY_TIMEOUT_S = 120.0
EMULATED = "h100/llama-3.1-70b"  # a long prompt takes half a second there, an answer minutes
EMULATE = f"--engine.emulate={EMULATED}"

PREDICTED = re.compile(
    r"first token in [\d.]+ ms (?P<place>local|remote), [\d.]+ (local|remote); "
    r"all answers' delays (?P<here>[\d.]+) against (?P<there>[\d.]+)"
)
ROUNDED = 0.1  # ms, of the numbers of a reason

Places = Counter[str]  # how many prompts of a kind had which place


class Client:
    """Requests to a frontend, with nothing but what a prompt needs."""

    def __init__(
        self, url: str, http: aiohttp.ClientSession, seed: str, model: str = "tandem-tiny"
    ) -> None:
        self._url, self._http, self._draw = url, http, random.Random(seed)
        self._model = model
        self.reasons: list[str] = []

    @contextlib.asynccontextmanager
    async def answers(self) -> AsyncIterator[None]:
        """Answers that run meanwhile."""
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(NUM_ANSWERS):
                response = await stack.enter_async_context(self._ask(100, 7000, stream=True))
                assert response.status == 200
                await response.content.readline()  # its first token has come
            yield

    async def places(self, num_tokens: int) -> Places:
        """Return the places of prompts that come one after another."""
        return Counter([await self._place(num_tokens) for _ in range(NUM_PROMPTS)])

    async def places_at_once(self, num_tokens: int) -> Places:
        """Return the places of prompts that come at once."""
        return Counter(await asyncio.gather(*(self._place(num_tokens) for _ in range(NUM_PROMPTS))))

    async def _place(self, num_tokens: int) -> str:
        async with self._ask(num_tokens, 2) as response:
            assert response.status == 200, await response.text()
            self.reasons.append(response.headers["x-tandem-prefill-reason"])
            return response.headers["x-tandem-prefill"]

    async def most_go(self) -> None:
        """Assert where prompts go while many answers run: most long ones away, no short one."""
        async with self.answers():
            short, long = await self.places(SHORT), await self.places(LONG)
        assert short["remote"] == 0, self.reasons
        assert long["remote"] > NUM_PROMPTS / 2, self.reasons

    async def go_as_predicted(self) -> None:
        """Assert that prompts beside many answers have the place that is predicted to be better."""
        async with self.answers():
            assert (await self.places(SHORT))["remote"] == 0, self.reasons
            del self.reasons[:]
            await self.places(LONG)
        predicted = [found for each in self.reasons if (found := PREDICTED.match(each))]
        assert predicted, self.reasons
        for found in predicted:
            here, there = float(found["here"]), float(found["there"])
            local, remote = (here, there) if found["place"] == "local" else (there, here)
            is_remote = found["place"] == "remote"
            gain = local * (1 - MIN_GAIN) - remote
            assert gain > -ROUNDED if is_remote else gain < ROUNDED, found[0]

    def _ask(
        self, num_tokens: int, max_tokens: int, *, stream: bool = False
    ) -> "aiohttp.client._BaseRequestContextManager[aiohttp.ClientResponse]":
        prompt = [self._draw.randrange(3, 1000) for _ in range(num_tokens)]
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
        body["model"] = self._model
        return self._http.post(f"{self._url}/v1/completions", json=body)


# ---- topologies ---------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def served(
    topology: str, folder: Path, emulated: str = "", *more: str
) -> AsyncIterator[Client]:
    flags = (*("--emulate", emulated), *more) if emulated else more
    model = Path(emulated).name if emulated else "tandem-tiny"
    timeout = aiohttp.ClientTimeout(total=120)
    async with (
        serving(topology, folder, *flags) as url,
        aiohttp.ClientSession(timeout=timeout) as http,
    ):
        yield Client(url, http, topology, model)


@pytest.mark.slow
async def test_fixed_roles_send_prompts_away_that_wait_for_a_batch_row(tmp_path: Path) -> None:
    flag = f"--engine.max_num_seqs={NUM_ANSWERS + 1}"
    async with (
        served("disagg-1p1d", tmp_path, EMULATED, flag) as client,
        client.answers(),
    ):
        places = await client.places_at_once(LONG)
    assert places["remote"] > NUM_PROMPTS / 2, client.reasons


@pytest.mark.parametrize(
    "topology",
    ["disagg-1p1d", pytest.param("disagg-2p2d", marks=pytest.mark.slow)],
)
async def test_fixed_roles_send_long_prompts_away_from_many_answers(
    topology: str, tmp_path: Path
) -> None:
    async with served(topology, tmp_path, EMULATED) as client:
        await client.most_go()


@pytest.mark.slow
async def test_workers_on_shared_cores_predict_each_place(tmp_path: Path) -> None:
    async with served("workers", tmp_path) as client:
        await client.go_as_predicted()


@pytest.mark.slow
async def test_a_worker_alone_computes_every_prompt(tmp_path: Path) -> None:
    async with served("aggregated", tmp_path, EMULATED) as client, client.answers():
        assert await client.places(LONG) == {"local": NUM_PROMPTS}


def test_every_topology_file_has_such_a_test() -> None:
    assert {path.stem for path in TOPOLOGIES.glob("*.yaml")} == {
        "aggregated", "disagg-1p1d", "disagg-2p2d", "workers",
    }  # fmt: skip


# ---- roles by hand, and what may happen to them -------------------------------------------------


@pytest.mark.slow
async def test_prompts_go_away_after_each_return_of_a_part(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await cluster.start_all(1, 1, EMULATE)
        client = Client(cluster.base_url, cluster.http, "by hand")
        await client.most_go()

        cluster.send_signal("prefill0", signal.SIGKILL)
        await cluster.children.pop("prefill0").stop(10.0)
        await cluster.ready(0, 1)
        async with client.answers():
            assert await client.places(LONG) == {"local": NUM_PROMPTS}
        await cluster.start("prefill1", "prefill", EMULATE)
        await cluster.ready(1, 1)
        await client.most_go()

        await cluster.nats.restart(empty=True)
        await cluster.etcd.restart(empty=True)
        await cluster.ready(1, 1)
        await queue_works(cluster)
        await client.most_go()


@pytest.mark.slow
async def test_prompts_go_away_after_a_change_of_role(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await cluster.start("frontend", "frontend")
        for name in ("one", "two"):
            await cluster.start(name, "worker", EMULATE)
        await cluster.registered("frontend", "one", "two")
        await change_role(cluster, "one", "decode")
        await change_role(cluster, "two", "prefill")
        await cluster.ready(1, 1)
        await Client(cluster.base_url, cluster.http, "changed").most_go()


async def change_role(cluster: Cluster, name: str, role: str) -> None:
    pid = cluster.children[name].pid
    address = next(each.address for each in await cluster.instances() if each.pid == pid)
    change = encode(msgspec.convert({"role": role, "type": "RoleChange"}, RoleChange))
    async with asyncio.timeout(READY_TIMEOUT_S):
        while True:
            try:
                context = RequestContext(timeout_s=READY_TIMEOUT_S)
                answer = await cluster.client.call(address, "change_role", change, context)
                break
            except UnavailableError:  # it is registered, and takes up its second role
                await asyncio.sleep(0.05)
    assert msgspec.msgpack.decode(answer, type=WorkerStatus).load.role == role


async def queue_works(cluster: Cluster) -> None:
    """Wait until the decode workers see NATS again."""
    async with asyncio.timeout(READY_TIMEOUT_S):
        while not all(each.details["nats"] for each in await cluster.statuses("decode")):
            await asyncio.sleep(0.1)
