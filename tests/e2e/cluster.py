"""A whole cluster of real processes for tests: NATS, etcd, frontend, prefill and decode workers."""

import asyncio
import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from pydantic import SecretStr

from tandem.frontend.config import new_page_key
from tandem.launch.serve.role_process import MODULES
from tandem.models.paths import BUNDLED_MODEL
from tandem.models.random_model import write_random_model
from tandem.runtime.address import new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ServiceError, TandemError
from tandem.runtime.local.child_process import ChildProcess
from tandem.runtime.local.fork_server import ForkServer
from tandem.runtime.local.local_servers import LocalEtcd, LocalNats
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.store.etcd import EtcdDiscovery
from tandem.runtime.wire.cluster_messages import Instance, WorkerStatus
from tests.services import free_port

LAUNCH = ("-m", "tandem.launch")
THREADS = {"OMP_NUM_THREADS": "1"}
READY_TIMEOUT_S = 100.0  # on a machine with other work
SETTLE_TIMEOUT_S = 60.0


def write_sensitive_model(folder: Path, num_kv_heads: int = 2) -> Path:
    """A model whose next tokens change with nearly every token of a prompt, and so with its KV."""
    return write_random_model(
        folder,
        vocab_size=320,
        hidden_size=64,
        num_layers=4,
        num_heads=4,
        num_kv_heads=num_kv_heads,
        head_dim=32,
        intermediate_size=128,
        tie_word_embeddings=False,
    )


@functools.cache
def forks() -> ForkServer:
    """Return the fork server of this test process: each cluster starts its workers with it."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-test-"))
    server = ForkServer(MODULES, os.environ | THREADS, folder / "forks.log")
    atexit.register(shutil.rmtree, folder)
    atexit.register(server.close)
    return server


@dataclass
class Answer:
    """What a client got: status, headers, text, and the parsed body or the stream's chunks."""

    status: int
    headers: dict[str, str]
    body: dict[str, Any]
    chunks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        if self.chunks:
            parts = [choice for chunk in self.chunks for choice in chunk.get("choices", [])]
            return "".join(
                part["text"] if "text" in part else part["delta"].get("content") or ""
                for part in parts
            )
        choice = self.body["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])

    @property
    def place(self) -> str:
        return self.headers["x-tandem-prefill"]


class RestartableNats(LocalNats):
    """Its port cannot be taken by somebody's connection while it is down."""

    def _choose_address(self) -> None:
        self.port = free_port()


class Cluster:
    """Starts and ends the processes it is asked for; everything on loopback."""

    def __init__(
        self, run_dir: Path, model: Path = BUNDLED_MODEL, token: str | None = None
    ) -> None:
        self.model = model
        self.token = token
        self.model_name = model.name
        self.nats = RestartableNats(run_dir)
        self.etcd = LocalEtcd(run_dir)
        self.children: dict[str, ChildProcess] = {}
        self._run_dir = run_dir
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        page_key = new_page_key().get_secret_value()
        self.page_url = f"{self.base_url}/ui#key={page_key}"
        self._environment = {**THREADS, "TANDEM_FRONTEND__PAGE_KEY": page_key}

    async def __aenter__(self) -> "Cluster":
        await self.nats.start()
        await self.etcd.start()
        self.runtime = RuntimeConfig(
            namespace="test",
            nats_url=self.nats.url,
            etcd_endpoints=self.etcd.url,
            cluster_token=None if self.token is None else SecretStr(self.token),
        )
        self.discovery = EtcdDiscovery(self.runtime)
        await self.discovery.start()
        self.client = RequestClient(self.runtime, "test-client")
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()
        await self.client.close()
        await self.discovery.close()
        for name in list(self.children):
            await self.end(name)
        await self.etcd.stop()
        await self.nats.stop()

    # ---- processes ----------------------------------------------------------------------------

    async def start(self, name: str, role: str, *flags: str, entry: Sequence[str] = LAUNCH) -> None:
        """Starts a role process called `name`, by what `entry` tells Python to run."""
        command = [sys.executable, *entry, role]
        if role == "frontend":
            command += ["--port", str(self.port)]
        else:
            command += [str(self.model), "--gpu", "cpu"]
        command += ["--nats-url", self.nats.url, "--etcd-endpoints", self.etcd.url]
        # a short lease: who dies without a word is forgotten soon
        command += ["--namespace", "test", "--runtime.lease_ttl_s=3", *flags]
        environment = os.environ | self._environment
        if self.token is not None:
            environment["TANDEM_RUNTIME__CLUSTER_TOKEN"] = self.token
        log = self._run_dir / f"{name}.log"
        shares_imports = role != "frontend" and entry == LAUNCH and "--emulate" not in flags
        start = forks().start if shares_imports else ChildProcess.start
        self.children[name] = await start(command, log, env=environment)

    async def start_all(
        self,
        num_prefill: int = 1,
        num_decode: int = 1,
        *flags: str,
        frontend_flags: Sequence[str] = (),
    ) -> None:
        """One frontend and the given workers, ready to answer."""
        await self.start("frontend", "frontend", *frontend_flags)
        for i in range(num_decode):
            await self.start(f"decode{i}", "decode", *flags)
        for i in range(num_prefill):
            await self.start(f"prefill{i}", "prefill", *flags)
        await self.ready(num_prefill, num_decode)

    async def ready(self, num_prefill: int, num_decode: int) -> None:
        """Until just these workers are registered and know each other, and the frontend is
        healthy.
        """
        async with asyncio.timeout(READY_TIMEOUT_S):
            while not await self._is_ready(num_prefill, num_decode):
                for child in self.children.values():
                    assert child.exit_code is None, child.log_tail()
                await asyncio.sleep(0.05)

    async def registered(self, *names: str) -> None:
        """Until these processes are known to the cluster, whatever else is."""
        missing = list(names)
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while missing:
                    await asyncio.sleep(0.02)
                    for name in names:
                        child = self.children[name]
                        assert child.exit_code is None, f"{name}: {child.log_tail()}"
                    with contextlib.suppress(ServiceError):
                        pids = {instance.pid for instance in await self.instances()}
                        missing = [name for name in names if self.children[name].pid not in pids]
        except TimeoutError:
            tails = [f"{name}:\n{self.children[name].log_tail()}" for name in missing]
            raise AssertionError("\n".join(["not registered:", *tails])) from None

    async def _is_ready(self, num_prefill: int, num_decode: int) -> bool:
        pids = {child.pid for child in self.children.values()}
        try:
            instances = await self.instances()
            decodes = await self.statuses("decode")
            is_healthy = (await self.get("/health")).status == 200
        except (aiohttp.ClientError, TandemError):
            return False
        roles = [instance.component for instance in instances if instance.pid in pids]
        counts = (roles.count("prefill"), roles.count("decode"))
        no_ghosts = len(roles) == len(instances)
        known = [each.details["num_prefill_instances"] for each in decodes]
        know_each_other = known == [num_prefill] * num_decode
        return is_healthy and no_ghosts and know_each_other and counts == (num_prefill, num_decode)

    async def end(self, name: str) -> None:
        """Stops a process cleanly, also one that is frozen."""
        child = self.children.pop(name)
        if child.exit_code is None:
            self.signal_child(child, signal.SIGCONT)
        await child.stop(15.0)

    def send_signal(self, name: str, number: signal.Signals) -> None:
        self.signal_child(self.children[name], number)

    @staticmethod
    def signal_child(child: ChildProcess, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)

    # ---- looking ------------------------------------------------------------------------------

    async def instances(self) -> list[Instance]:
        records = await self.discovery.get_prefix("/tandem/test/instances/")
        return [msgspec.json.decode(value, type=Instance) for value in records.values()]

    async def statuses(self, component: str) -> list[WorkerStatus]:
        """What the workers that run say of themselves; the dead may still be registered."""
        answers = []
        pids = {child.pid for child in self.children.values() if child.exit_code is None}
        for instance in await self.instances():
            if instance.component == component and instance.pid in pids:
                context = RequestContext(timeout_s=SETTLE_TIMEOUT_S)
                data = await self.client.call(instance.address, "status", b"", context)
                answers.append(msgspec.msgpack.decode(data, type=WorkerStatus))
        return answers

    async def balanced(self) -> None:
        """Until every worker's pool holds nothing: all blocks are free or cached."""
        async with asyncio.timeout(SETTLE_TIMEOUT_S):
            while True:
                workers = await self.statuses("decode") + await self.statuses("prefill")
                loads = [worker.load for worker in workers]
                if all(
                    load.num_free_blocks + load.num_cached_blocks == load.num_blocks
                    and load.num_running == load.num_waiting == 0
                    for load in loads
                ):
                    return
                await asyncio.sleep(0.05)

    async def remote_works(self) -> None:
        """Until a prompt is prefilled remotely; every answer is one."""
        async with asyncio.timeout(SETTLE_TIMEOUT_S):
            while True:
                answer = await self.complete(
                    [5] * 100,
                    max_tokens=2,
                    cache_salt=new_id(),
                    headers={"x-tandem-prefill": "remote"},
                )
                assert answer.status == 200, answer.body
                if answer.place == "remote":
                    return
                await asyncio.sleep(0.05)

    async def set_config(self, key: str, value: object) -> None:
        """Sets a live key and waits until every decode worker reports it in force."""
        data = json.dumps(value).encode()
        await self.discovery.put_config(f"/tandem/test/config/{key}", data)
        while any(worker.details.get(key) != value for worker in await self.statuses("decode")):
            await asyncio.sleep(0.02)

    # ---- asking -------------------------------------------------------------------------------

    async def get(self, path: str) -> Answer:
        async with self.http.get(self.base_url + path) as response:
            text = await response.text()
            body = json.loads(text) if text.startswith("{") else {"text": text}
            return Answer(response.status, dict(response.headers), body)

    async def complete(self, prompt: object, **options: Any) -> Answer:
        """A completion with the cluster's model; `headers` adds request headers."""
        return await self._post("/v1/completions", {"prompt": prompt, **options})

    async def chat(self, content: str, **options: Any) -> Answer:
        messages = [{"role": "user", "content": content}]
        return await self._post("/v1/chat/completions", {"messages": messages, **options})

    async def _post(self, path: str, body: dict[str, Any]) -> Answer:
        headers = body.pop("headers", {})
        body = {"model": self.model_name, **body}
        async with self.http.post(self.base_url + path, json=body, headers=headers) as response:
            if response.content_type != "text/event-stream":
                return Answer(response.status, dict(response.headers), await response.json())
            chunks = [chunk async for chunk in events(response)]
            return Answer(response.status, dict(response.headers), {}, chunks)


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a stream, which must end with [DONE] or an error event."""
    ended = False
    async for line in response.content:
        if line.startswith(b"data: [DONE]"):
            ended = True
        elif line.startswith(b"data: "):
            event = json.loads(line[6:])
            ended = ended or "error" in event
            yield event
    assert ended, "the stream broke off without [DONE] or an error"
