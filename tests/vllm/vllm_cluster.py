"""vLLM engines and a frontend as real processes, started as a user starts them."""

import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest

from tandem.runtime.address import new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ConfigError
from tandem.runtime.membership.node import Node
from tandem.runtime.store.discovery import watch_instances, watch_transfer
from tandem.runtime.wire.cluster_messages import WorkerStatus
from tandem.vllm.versions import check_version
from tests.services import EtcdServer, NatsServer, eventually, free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_disagg" / "vllm_disagg.py"
_PARTS = {"scheduler": "VLLM::EngineCore", "rank": "VLLM::Worker", "rank 1": "VLLM::Worker_TP1"}
PATIENCE_S = 600.0  # a start of vLLM takes a minute of two idle cores
ARGUMENTS = (
    "--max-model-len", "2048", "--max-num-seqs", "16", "--dtype", "float32", "--enforce-eager",
)  # fmt: skip
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines on one machine would share their cores
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def _is_installed() -> bool:
    try:
        check_version()
    except ConfigError:
        return False
    return True


# of tests; the import alone would not tell: this room's folder has vLLM's name, and is none
NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.timeout(PATIENCE_S),
    pytest.mark.skipif(not _is_installed(), reason="vLLM is not installed: make test-vllm"),
]


def parts_of(engine: psutil.Process) -> dict[str, psutil.Process]:
    """Return the processes of an engine: its own, vLLM's scheduler, the rank or ranks."""
    found = {"engine": engine}
    for each in engine.children(recursive=True):
        name = " ".join(each.cmdline())
        found |= {part: each for part, word in _PARTS.items() if word in name}
    return found


def random_prompt(num_tokens: int) -> list[int]:
    return [random.randrange(256) for _ in range(num_tokens)]


async def kv_in_use(http: Any, port: int) -> float:
    """Return the share of blocks in use, by the metrics of a vLLM."""
    async with http.get(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return next(float(e.split()[-1]) for e in lines if e.startswith("vllm:kv_cache_usage_perc{"))


def with_plugin(folder: Path, function: str) -> str:
    """Return a PYTHONPATH with which vLLM's processes call this function, "module:name", first."""
    info = folder / "flips-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flips\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nflips = {function}\n")
    paths = [str(folder), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, paths))


class VllmCluster:
    """Processes of one namespace, and requests to their frontend."""

    def __init__(self, nats: NatsServer, etcd: EtcdServer, model: Path, logs: Path) -> None:
        self.model = model
        self.address = f"http://127.0.0.1:{(port := free_port())}"
        self._port = port
        self._services = ["--nats-url", nats.url, "--etcd-endpoints", etcd.url]
        self._addresses = {"nats_url": nats.url, "etcd_endpoints": etcd.url}
        self.metrics = f"http://127.0.0.1:{(metrics_port := free_port())}/metrics"
        self._metrics_port = metrics_port
        self._namespace = new_id()
        self._logs = logs
        self._running: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **os.environ,
            **ENVIRONMENT,
            "NATS_SERVER": nats.url,
            "ETCD_ENDPOINTS": etcd.url,
            "TANDEM_RUNTIME__NAMESPACE": self._namespace,
            "TANDEM_RUNTIME__DRAIN_TIMEOUT_S": "60",
        }

    def start_frontend(self) -> None:
        place = ["--namespace", self._namespace, "--port", str(self._port)]
        self._start("frontend", *self._services, *place)

    def start_engine(self, *arguments: str, metrics_port: int = 0) -> None:
        self.environment["TANDEM_SYSTEM_PORT"] = str(metrics_port or self._metrics_port)
        words = (str(self.model), "--served-model-name", "random", *ARGUMENTS, *arguments)
        self.engine = self._start("engine", "vllm", *words)

    def start_pair(self, *arguments: str) -> None:
        """Start a decode worker and a prefill worker, as the example does."""
        words = (str(self.model), "--served-model-name", "random", *ARGUMENTS, *arguments)
        self._start(*words, program=(str(EXAMPLE),))

    @property
    def prefill_processes(self) -> dict[str, psutil.Process]:
        """The processes of the pair's prefill worker."""
        pair = psutil.Process(self._running[-1].pid).children()
        return next((parts_of(each) for each in pair if "prefill" in each.cmdline()), {})

    def _start(
        self, *words: str, program: Sequence[str] = ("-m", "tandem.launch")
    ) -> subprocess.Popen[bytes]:
        log = self._logs / f"{len(self._running)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *program, *words],
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._running.append(process)
        return process

    def check_alive(self) -> None:
        """Assert that no process has ended, or show its log."""
        for index, process in enumerate(self._running):
            assert process.poll() is None, self.log(index)

    def log(self, index: int) -> str:
        return (self._logs / f"{index}.log").read_text()

    def end(self) -> None:
        for process in reversed(self._running):
            process.terminate()
        for process in self._running:
            process.wait(PATIENCE_S)

    async def prefill_ready(self, num_ranks: int = 1) -> None:
        """Wait until each rank of the decode worker has found its prefill worker."""

        async def all_have() -> bool:
            self.check_alive()
            decode = [each for each in await self.members() if each.load.role == "decode"]
            return [each.details["num_prefill_workers"] for each in decode] == [1] * num_ranks

        await eventually(all_have, PATIENCE_S, pause_s=0.1)

    async def ready(self, http: aiohttp.ClientSession) -> None:
        """Wait until the frontend has the model."""

        async def has_model() -> bool:
            self.check_alive()
            with suppress(aiohttp.ClientConnectionError):
                async with http.get(f"{self.address}/v1/models") as answer:
                    return bool((await answer.json())["data"])
            return False

        await eventually(has_model, PATIENCE_S, pause_s=0.1)

    async def num_ended(self, end: str) -> int:
        """Return how many handoffs of all ranks ended so."""
        members = await self.members()
        return sum(int(each.details.get(f"handoffs.{end}", 0)) for each in members)

    async def members(self) -> list[WorkerStatus]:
        """Return the status of the connector of every vLLM: decode workers, then prefill workers.

        A prefill worker that is dead counts until its lease ends; it has no status.
        """
        config = RuntimeConfig(namespace=self._namespace, **self._addresses)
        async with Node(config, component="test", serves=False) as node:
            peers = watch_transfer(node.discovery, self._namespace)
            helpers = watch_instances(node.discovery, self._namespace, "prefill")
            await peers.ready()
            await helpers.ready()
            addresses = [each.address for each in peers.items.values()]
            addresses += [each.address for each in helpers.items.values()]
            found = []
            for address in addresses:
                async with RequestContext(timeout_s=10.0) as context:
                    answer = await node.client.call(address, "status", b"", context)
                    found.append(msgspec.msgpack.decode(answer, type=WorkerStatus))
            await peers.close()
            await helpers.close()
            return found

    async def complete(
        self, http: aiohttp.ClientSession, prompt: list[int], place: str, **fields: Any
    ) -> str:
        """Return the answer to a prompt, with a place that its caller wants."""
        return (await self.ask(http, prompt, place, **fields))[0]

    async def ask(
        self, http: aiohttp.ClientSession, prompt: list[int], place: str, **fields: Any
    ) -> tuple[str, Mapping[str, str]]:
        """Return the answer to a prompt that was in no cache before, and the headers."""
        body = {"model": "random", "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
        body |= {"temperature": 0, "cache_salt": new_id(), **fields}
        headers = {"x-tandem-prefill": place}
        async with http.post(
            f"{self.address}/v1/completions", json=body, headers=headers
        ) as answer:
            found = await answer.json()
            assert answer.status == 200, found
            return str(found["choices"][0]["text"]), answer.headers

    async def chat(
        self, http: aiohttp.ClientSession, status: int = 200, **fields: Any
    ) -> dict[str, Any]:
        """Return the body of a chat's answer, which has this status."""
        messages = [{"role": "user", "content": fields.pop("content", "Once upon a time")}]
        body = {"model": "random", "messages": messages, "max_tokens": 12, **fields}
        async with http.post(f"{self.address}/v1/chat/completions", json=body) as answer:
            found: dict[str, Any] = await answer.json()
            assert answer.status == status, found
            return found
