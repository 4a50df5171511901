"""Every query of the dashboards has data, and every alert fires, before a cluster under load.

Prometheus and the faults are real; only TandemKernelBuiltWhileServing, which takes a GPU, fires on
recorded series (tests/tools/dashboards).
"""

import asyncio
import contextlib
import json
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from tandem.queue.streams import QueueNames
from tandem.runtime.bus.nats import NatsConnection
from tests.e2e.cluster import Cluster
from tests.e2e.prometheus import BINARY, Prometheus
from tests.services import eventually
from tests.soak.points import Trap
from tools.dashboards.write import ALERT_WINDOW, FOLDER, rules

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    pytest.mark.skipif(BINARY is None, reason="Debian's package `prometheus` is not installed"),
]

NUM_WORKERS = (1, 2)
FLAGS = (
    "--runtime.metrics_port=0",
    "--runtime.lease_ttl_s=10",  # a stopped worker stays registered until it is found silent
    "--engine.num_blocks=150",  # a pool that long answers fill
)
FRONTEND_FLAGS = ("--frontend.migration_wait_s=1", "--frontend.return_wait_s=1")
DOOMED = Path(__file__).parents[1] / "soak" / "doomed_worker.py"
WINDOW = "10s"
PATIENCE_S = 60.0
LEASE_S = 2
EASY = {
    "ttft_target_ms": 3_600_000,
    "itl_target_ms": 3_600_000,
    "claim_timeout_ms": 30_000,
    "handoff_timeout_ms": 10_000,
}
NUM_CLIENTS = 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prometheus(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Prometheus]:
    """It evaluates the rules over a shorter time, and alerts at once."""
    url = f"{cluster.base_url}/metrics/targets"
    quick = rules(window=WINDOW, after="0s")
    async with Prometheus(tmp_path_factory.mktemp("prometheus"), url, quick) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def flipping(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Trap:
    """A decode worker that flips a bit of each landed block, loaded while other tests run."""
    trap = Trap(tmp_path_factory.mktemp("flipping"))
    hooks = json.dumps({"folder": str(trap.folder), "flip_probability": 1.0, "standby": True})
    await cluster.start("flipping", "decode", *FLAGS, entry=(str(DOOMED), hooks))
    return trap


@pytest_asyncio.fixture(loop_scope="module")
async def load(cluster: Cluster) -> AsyncIterator[None]:
    """Clients that ask for short and for long prompts, wherever they are prefilled."""
    clients = [asyncio.create_task(ask_always(cluster, seed)) for seed in range(NUM_CLIENTS)]
    yield
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)


async def ask_always(cluster: Cluster, seed: int) -> None:
    draw = random.Random(seed)
    while True:
        place = draw.choice(("remote", None))
        headers = {} if place is None else {"x-tandem-prefill": place}
        length = draw.choice((5, 100, 300))
        prompt = [3] * 32 + [draw.randrange(3, 1000) for _ in range(length)]
        answer = await cluster.complete(prompt, max_tokens=8, headers=headers)
        if answer.status != 200:
            await asyncio.sleep(0.1)


async def fires(prometheus: Prometheus, *names: str) -> None:
    """Until each of these alerts has fired."""
    missing = set(names)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while missing := set(names) - await prometheus.fired():
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise AssertionError(f"silent: {missing}") from None


@contextlib.contextmanager
def many(cluster: Cluster, number: int, num_tokens: int, **options: object) -> Iterator[None]:
    """This many requests of random prompts at once, again and again while the block runs."""

    async def ask(seed: int) -> None:
        draw = random.Random(seed)
        while True:
            prompt = [draw.randrange(3, 1000) for _ in range(num_tokens)]
            await cluster.complete(prompt, **options)

    asking = [asyncio.create_task(ask(seed)) for seed in range(number)]
    try:
        yield
    finally:
        for each in asking:
            each.cancel()


def expressions() -> list[str]:
    """The queries of all dashboards, with values for Grafana's variables."""
    return [
        target["expr"].replace("$__rate_interval", WINDOW).replace("$model", ".*")
        for page in sorted(FOLDER.glob("*.json"))
        for panel in json.loads(page.read_text())["panels"]
        for target in panel["targets"]
    ]


@pytest.mark.usefixtures("load")
async def test_every_query_has_data_and_nothing_is_red(
    cluster: Cluster, prometheus: Prometheus
) -> None:
    for key, value in EASY.items():
        await cluster.set_config(f"disagg.{key}", value)
    missing = expressions()
    assert len(missing) > 40
    try:
        async with asyncio.timeout(PATIENCE_S):
            while missing := [each for each in missing if not await prometheus.query(each)]:
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise AssertionError("\n".join(["without data:", *missing])) from None

    async def nothing_is_red() -> bool:  # on a busy machine a handoff may fail now and then
        return not await prometheus.firing()

    await eventually(nothing_is_red)


async def test_every_process_is_found_with_its_role(prometheus: Prometheus) -> None:
    series = await prometheus.query('count by (role) (up{job="tandem"} == 1)')
    found = {each["metric"]["role"]: int(each["value"][1]) for each in series}
    assert found == {"frontend": 1, "decode": 2, "prefill": 1}


async def test_a_gateway_finds_every_worker(cluster: Cluster, prometheus: Prometheus) -> None:
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        series = await prometheus.query(f"vllm:{name}")
        assert len(series) == 3
        assert {each["metric"]["model_name"] for each in series} == {cluster.model_name}


async def test_a_message_that_is_no_job_is_a_dead_letter(
    cluster: Cluster, prometheus: Prometheus
) -> None:
    deployment, *_ = {each.deployment for each in await cluster.instances() if each.deployment}
    nats = NatsConnection(cluster.runtime)
    await nats.start()
    try:
        subject = QueueNames.of("test", cluster.model_name, deployment).subject
        await nats.client.jetstream().publish(f"{subject}.5", b"not a job")
    finally:
        await nats.close()
    await fires(prometheus, "TandemDeadLetters")


@pytest.mark.usefixtures("load")
async def test_targets_that_no_answer_keeps_are_missed(
    cluster: Cluster, prometheus: Prometheus
) -> None:
    for key in ("ttft_target_ms", "itl_target_ms"):
        await cluster.set_config(f"disagg.{key}", 0.01)
    await fires(prometheus, "TandemTtftMissed", "TandemItlMissed")
    for key in ("ttft_target_ms", "itl_target_ms"):
        await cluster.set_config(f"disagg.{key}", EASY[key])


async def test_a_burst_of_prompts_fills_the_prefill_queue(
    cluster: Cluster, prometheus: Prometheus
) -> None:
    thresholds = {"policy": "threshold", "max_local_prefill_length": 50}
    for key, value in {**thresholds, "max_prefill_queue_size": 1}.items():
        await cluster.set_config(f"disagg.{key}", value)
    with many(cluster, 12, 500, max_tokens=1):
        await fires(prometheus, "TandemPrefillQueueFull")
    await cluster.set_config("disagg.policy", "adaptive")


async def test_prompts_that_wait_beside_an_idle_prefill_worker_are_reported(
    cluster: Cluster, prometheus: Prometheus
) -> None:
    await cluster.set_config("disagg.policy", "always_local")
    with many(cluster, 24, 500, max_tokens=1):
        await fires(prometheus, "TandemPrefillIdle")
    await cluster.set_config("disagg.policy", "adaptive")


async def test_answers_that_outgrow_the_pool_take_blocks_from_one_another(
    cluster: Cluster, prometheus: Prometheus
) -> None:
    with many(cluster, 16, 300, max_tokens=700, ignore_eos=True):
        await fires(prometheus, "TandemKvPoolFull", "TandemPreemptions")


async def test_a_stopped_prefill_worker_is_silent_and_its_handoffs_fail(
    cluster: Cluster, prometheus: Prometheus
) -> None:
    assert "TandemProcessSilent" not in await prometheus.fired()
    await cluster.set_config("disagg.claim_timeout_ms", 200)
    await cluster.set_config("disagg.handoff_timeout_ms", LEASE_S * 1000)
    headers = {"x-tandem-prefill": "remote"}
    with many(cluster, 12, 500, max_tokens=1, headers=headers):

        async def is_working() -> bool:
            return any(w.details["num_jobs"] for w in await cluster.statuses("prefill"))

        async def has_quarantine() -> bool:
            workers = await cluster.statuses("decode")
            return any(each.details["num_quarantined_blocks"] for each in workers)

        async def is_stopped_in_mid_write() -> bool:  # not where it had nothing in hand just then
            await eventually(is_working)
            cluster.send_signal("prefill0", signal.SIGSTOP)
            with contextlib.suppress(AssertionError):
                await eventually(has_quarantine, 4 * LEASE_S)
                return True
            cluster.send_signal("prefill0", signal.SIGCONT)
            return False

        await eventually(is_stopped_in_mid_write)
        names = ("TandemProcessSilent", "TandemHandoffsFail", "TandemQuarantineStays")
        try:
            await fires(prometheus, *names)
        finally:
            cluster.send_signal("prefill0", signal.SIGCONT)
    for key in ("claim_timeout_ms", "handoff_timeout_ms"):
        await cluster.set_config(f"disagg.{key}", EASY[key])
    await cluster.ready(1, 2)


async def test_flipped_bits_are_corrupt_kv_and_exclude_the_prefill_worker(
    cluster: Cluster, prometheus: Prometheus, flipping: Trap
) -> None:
    flipping.go()
    await cluster.ready(1, 3)

    async def is_scraped() -> bool:
        return len(await prometheus.query('up{role="decode"} == 1')) == 3

    await eventually(is_scraped)
    with many(cluster, 4, 500, max_tokens=1, headers={"x-tandem-prefill": "remote"}):
        await fires(prometheus, "TandemCorruptKv", "TandemPrefillWorkerExcluded")


async def test_a_killed_decode_worker_is_lost(cluster: Cluster, prometheus: Prometheus) -> None:

    async def is_firing() -> bool:
        return "TandemDecodeWorkerLost" in await prometheus.firing()

    async def is_quiet() -> bool:  # a worker that is starved of CPU time counts as lost for a while
        return not await is_firing()

    busy: list[str] = []  # decode workers with answers, of which one may have all

    async def is_answering() -> bool:
        pids = {w.instance.pid for w in await cluster.statuses("decode") if w.load.num_running}
        busy[:] = [name for name, child in cluster.children.items() if child.pid in pids]
        return bool(busy)

    with many(cluster, 6, 20, max_tokens=500, ignore_eos=True):
        await eventually(is_quiet)
        await eventually(is_answering)
        cluster.send_signal(busy[0], signal.SIGKILL)
        await eventually(is_firing)
    await cluster.end(busy[0])


@pytest.mark.usefixtures("load")
async def test_without_a_decode_worker_requests_fail(
    cluster: Cluster, prometheus: Prometheus
) -> None:
    for name in {"decode0", "decode1", "flipping"} & cluster.children.keys():
        cluster.send_signal(name, signal.SIGKILL)
    await fires(prometheus, "TandemNoDecodeWorker", "TandemRequestsFail")


async def test_the_committed_rules_are_those_that_fired(prometheus: Prometheus) -> None:
    committed = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
    quick = yaml.safe_load(rules(window=WINDOW, after="0s"))["groups"][0]["rules"]
    for one, other in zip(committed, quick, strict=True):
        assert one["expr"].replace(f"[{ALERT_WINDOW}]", f"[{WINDOW}]") == other["expr"]
    names = {each["alert"] for each in committed}
    assert await prometheus.fired() == names - {"TandemKernelBuiltWhileServing"}
