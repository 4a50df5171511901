"""What each worker of a large cluster costs its services and frontends, by real processes.

python -m tandem.bench.stack.fleet --workers 10 50 100 --output fleet.json
"""

import asyncio
import itertools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import psutil
from nats.aio.msg import Msg

from tandem.bench.client.openai import OpenAIClient, PreparedRequest
from tandem.bench.client.record import RequestRecord
from tandem.bench.report.console import say
from tandem.bench.report.figures import Figure, at_most
from tandem.bench.report.options import option, parse
from tandem.bench.report.program import run_program
from tandem.runtime.bus.nats import NatsConnection
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ServiceError
from tandem.runtime.local.child_process import ChildProcess
from tandem.runtime.local.local_servers import LocalEtcd, LocalNats
from tandem.runtime.local.ports import free_port
from tandem.runtime.process.lifecycle import started
from tandem.runtime.store.etcd import EtcdDiscovery
from tandem.sdk.engine.worker_config import WorkerConfig
from tandem.sdk.engine_worker.worker import EngineWorker
from tandem.sdk.sample_engine import BUNDLED_MODEL, SampleEngine, SampleOptions

MODULE = "tandem.bench.stack.fleet"
MODEL = "light"
PER_PROCESS = 25  # workers: each has connections, a lease and records of its own
START_TIMEOUT_S = 120.0
LOST_TIMEOUT_S = 30.0
POLL_S = 0.05
TOKENS = 100  # of an answer

HOW = {
    "workers": f"sample engines of the kit, {PER_PROCESS} to a process; each has a lease, records, "
    "connections to NATS and etcd, a request plane and load reports of its own",
    "etcd": "keys and bytes under /tandem/, and etcd's own count of watchers",
    "messages": "all of NATS a second, seen by a subscriber to everything",
    "cpu": "CPU time over time; 100 % is one core",
    "tokens": "events of streams, which hold a token each where nobody is late",
    "connections": "established TCP connections of one frontend, under load",
    "noticed": "from kill -9 of a worker with answers until no frontend's metrics count it",
}


async def serve_workers(count: int, token_s: float) -> None:
    """Serve `count` workers of the cluster that the environment names, until a signal."""
    options = SampleOptions(model_name=MODEL, token_interval_s=token_s)
    config = WorkerConfig(MODEL, model_name=BUNDLED_MODEL, served_model_name=MODEL)
    for _ in range(count):
        await EngineWorker(SampleEngine(options), config).startup()
    await asyncio.Event().wait()


class Fleet:
    """NATS, etcd, frontends and workers; `async with` starts and ends all of it."""

    def __init__(self, run_dir: Path, options: "Options") -> None:
        self._run_dir = run_dir
        self._token_ms = options.token_ms
        self._ports = [free_port() for _ in range(options.frontends)]
        self._names = itertools.count()
        self._exits = AsyncExitStack()
        self.frontends: list[ChildProcess] = []
        self.hosts: list[ChildProcess] = []

    async def __aenter__(self) -> "Fleet":
        enter = self._exits.enter_async_context
        nats = await enter(LocalNats(self._run_dir))
        self.etcd = await enter(LocalEtcd(self._run_dir))
        self.config = RuntimeConfig(nats_url=nats.url, etcd_endpoints=self.etcd.url)
        self.discovery = EtcdDiscovery(self.config)
        await enter(started(self.discovery))
        self.http = await enter(httpx.AsyncClient(timeout=60, limits=httpx.Limits()))
        for port in self._ports:
            words = ["-m", "tandem.launch", "frontend", "--port", str(port)]
            self.frontends.append(await self._start(words))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    async def add_workers(self, count: int) -> ChildProcess:
        """Start a process with so many workers."""
        words = ["-m", MODULE, "--serve", str(count), "--token-ms", f"{self._token_ms:g}"]
        host = await self._start(words)
        self.hosts.append(host)
        return host

    async def num_watchers(self) -> float:
        """Return the watchers that etcd counts."""
        uds = httpx.AsyncHTTPTransport(uds=str(self.etcd.socket))
        async with httpx.AsyncClient(transport=uds) as etcd:
            text = (await etcd.get("http://etcd/metrics")).text
        return float(text.partition("\netcd_debugging_mvcc_watcher_total ")[2].split()[0])

    async def until_known(self, count: int, limit_s: float) -> float:
        """Return the seconds until every frontend can route to `count` workers."""
        begun_s = time.perf_counter()
        while await self._known() != {count}:
            if time.perf_counter() - begun_s > limit_s:
                tails = "\n".join(each.log_tail(3) for each in [*self.hosts, *self.frontends])
                raise ServiceError(f"not {count} workers known after {limit_s:g} s:\n{tails}")
            await asyncio.sleep(POLL_S)
        return time.perf_counter() - begun_s

    async def _known(self) -> set[int]:
        """Return the numbers of workers that the frontends know."""
        try:
            texts = [(await self.http.get(f"{url}/metrics")).text for url in self.urls]
        except httpx.TransportError:  # one does not listen yet
            return set()
        lines = (text.partition("decode_workers{")[2].partition("\n")[0] for text in texts)
        return {int(float(line.split()[-1])) if line else 0 for line in lines}

    async def _start(self, words: list[str]) -> ChildProcess:
        names = {"NATS_URL": self.config.nats_url, "ETCD_ENDPOINTS": self.config.etcd_endpoints}
        own = {f"TANDEM_RUNTIME__{name}": value for name, value in names.items()}
        log = self._run_dir / f"{next(self._names)}.log"
        child = await ChildProcess.start([sys.executable, *words], log, env=os.environ | own)
        self._exits.push_async_callback(child.stop, 10.0)
        return child


def cpu_s(children: Sequence[ChildProcess]) -> float:
    """Return the CPU time of processes so far."""
    return sum(sum(psutil.Process(each.pid).cpu_times()[:2]) for each in children)


def memory_mib(children: Sequence[ChildProcess]) -> float:
    """Return the resident memory of processes."""
    return sum(psutil.Process(each.pid).memory_info().rss for each in children) / 2**20


async def measure(run_dir: Path, options: "Options", count: int) -> list[Figure]:
    """Return the figures of one number of workers."""
    found: dict[str, tuple[str, float]] = {}
    answer_s = 1.2 * TOKENS * options.token_ms / 1e3
    async with Fleet(run_dir, options) as fleet:
        for first in range(0, count, PER_PROCESS):
            await fleet.add_workers(min(PER_PROCESS, count - first))
        await fleet.until_known(count, START_TIMEOUT_S)
        records = await fleet.discovery.get_prefix("/tandem/")
        found["etcd keys"] = "", len(records)
        found["etcd bytes"] = "B", sum(len(key) + len(value) for key, value in records.items())
        found["etcd watchers"] = "", await fleet.num_watchers()
        found["memory of all workers"] = "MiB", memory_mib(fleet.hosts)
        found["memory of a frontend"] = "MiB", memory_mib(fleet.frontends[:1])
        found |= await _rates(fleet, options, "idle", [])
        answers = list[RequestRecord]()
        clients = itertools.cycle([OpenAIClient(url) for url in fleet.urls])
        callers = [
            asyncio.create_task(_ask(client, number, answers))
            for number, client in zip(range(options.streams), clients, strict=False)
        ]
        try:
            await asyncio.sleep(answer_s)  # until answers end all the time
            found |= await _rates(fleet, options, f"{options.streams} streams", answers)
            tcp = psutil.Process(fleet.frontends[0].pid).net_connections("tcp")
            found["connections"] = "", sum(each.status == "ESTABLISHED" for each in tcp)
            one = await fleet.add_workers(1)
            await fleet.until_known(count + 1, START_TIMEOUT_S)
            await asyncio.sleep(answer_s)  # until it has answers of every frontend
            one.signal(signal.SIGKILL)
            found["noticed"] = "s", await fleet.until_known(count, LOST_TIMEOUT_S)
        finally:
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
        found["failed requests"] = "", sum(bool(answer.error) for answer in answers)
    targets = {"noticed": at_most(2.0), "failed requests": at_most(0.0)}
    return [
        Figure(f"{count}_{name}", f"{count} workers, {name}", unit, (value,), targets.get(name))
        for name, (unit, value) in found.items()
    ]


async def _ask(client: OpenAIClient, number: int, answers: list[RequestRecord]) -> None:
    """Ask one request after another."""
    fields = {"model": MODEL, "prompt": f"{number} " * 50, "max_tokens": TOKENS, "stream": True}
    request = PreparedRequest(msgspec.json.encode(fields), TOKENS)
    while True:
        record = RequestRecord(number, 0.0)
        answers.append(record)
        await client.send(request, record, 0.0)
        if record.error:
            say(f"a request failed: {record.error}: {record.error_message}")


async def _rates(
    fleet: Fleet, options: "Options", kind: str, answers: Sequence[RequestRecord]
) -> dict[str, tuple[str, float]]:
    """Return rates of tokens, of NATS messages and of CPU time over some seconds.

    Tokens count as they come: an answer may take longer than that.
    """
    counts = Counter[str]()

    async def note(message: Msg) -> None:
        counts["load reports" if ".load." in message.subject else "other messages"] += 1

    async with started(NatsConnection(fleet.config)) as connection:
        await connection.client.subscribe(">", cb=note)
        num_before, begun_s = _num_tokens(answers), time.perf_counter()
        cpu_before_s = cpu_s(fleet.hosts), cpu_s(fleet.frontends)
        await asyncio.sleep(options.seconds)
        took_s = time.perf_counter() - begun_s
        cpu_after_s = cpu_s(fleet.hosts), cpu_s(fleet.frontends)
        counts["tokens"] = _num_tokens(answers) - num_before
    rates = {name: ("/s", count / took_s) for name, count in counts.items()}
    hosts, frontends = (
        100 * (then - now) / took_s for now, then in zip(cpu_before_s, cpu_after_s, strict=True)
    )
    rates |= {"CPU of all workers": ("%", hosts), "CPU of all frontends": ("%", frontends)}
    return {f"{kind}: {name}": rate for name, rate in rates.items()}


def _num_tokens(answers: Sequence[RequestRecord]) -> int:
    return sum(len(answer.output_times_s) for answer in answers)


@dataclass(frozen=True, slots=True)
class Options:
    """Measure what each worker of a cluster costs its services and frontends."""

    workers: tuple[int, ...] = option((10, 50, 100), "numbers of workers, one after another")
    frontends: int = option(4, "frontends", least=1)
    streams: int = option(200, "answers at one time, over all frontends", least=1)
    token_ms: float = option(50.0, "between two tokens of an answer", least=0.1)
    seconds: float = option(10.0, "of each count", least=1)
    serve: int = option(0, "serve so many workers, as a child of this program", least=0)
    output: Path | None = option(None, "write everything as JSON")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(Options, MODULE, arguments)
    if options.serve:
        asyncio.run(serve_workers(options.serve, options.token_ms / 1e3))

    async def figures(run_dir: Path) -> list[Figure]:
        found: list[Figure] = []
        for count in options.workers:
            folder = run_dir / str(count)
            folder.mkdir()
            found += await measure(folder, options, count)
        return found

    return run_program(MODULE, options, HOW, figures)


if __name__ == "__main__":
    sys.exit(main())
