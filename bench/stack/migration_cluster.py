"""Sample engines behind a frontend, as processes to kill, stop and end."""

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from tandem.bench.client.openai import OpenAIClient
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ServiceError
from tandem.runtime.local.child_process import ChildProcess
from tandem.runtime.local.local_servers import LocalEtcd, LocalNats
from tandem.runtime.local.ports import free_port
from tandem.runtime.process.lifecycle import started
from tandem.runtime.store.discovery import read_instances
from tandem.runtime.store.etcd import EtcdDiscovery
from tandem.runtime.wire.cluster_messages import Instance

MODELS = ("alpha", "beta")
WORKERS_PER_MODEL = 2
DRAIN_TIMEOUT_S = 2.0  # of a worker after SIGTERM; it gives up the requests that are left then
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.05


class SampleCluster:
    """NATS, etcd, a frontend, and two sample engines of each of two models.

    `async with` starts and ends all of it; logs are written into the folder `run_dir`.
    """

    def __init__(self, run_dir: Path, token_interval_ms: float) -> None:
        self._run_dir = run_dir
        self._token_interval_ms = token_interval_ms
        self._exits = AsyncExitStack()
        self._num_started = 0
        self._frontend: ChildProcess
        self.workers: dict[str, ChildProcess] = {}
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> "SampleCluster":
        async with AsyncExitStack() as exits:
            nats = await exits.enter_async_context(LocalNats(self._run_dir))
            etcd = await exits.enter_async_context(LocalEtcd(self._run_dir))
            self._config = RuntimeConfig(nats_url=nats.url, etcd_endpoints=etcd.url)
            self._discovery = EtcdDiscovery(self._config)
            await exits.enter_async_context(started(self._discovery))
            exits.push_async_callback(self._end_all)
            frontend = ["-m", "tandem.launch", "frontend", "--port", str(self._port)]
            self._frontend = await self._start("frontend", frontend)
            exits.push_async_callback(self._frontend.stop, STOP_TIMEOUT_S)
            for model in MODELS:
                for ordinal in range(WORKERS_PER_MODEL):
                    await self.start_worker(f"{model}-{ordinal}")
            await self.ready()
            self._exits = exits.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def start_worker(self, name: str) -> None:
        """Start the worker `model-ordinal`, anew if it has ended; `ready` waits for it."""
        model = name.rpartition("-")[0]
        engine = ["-m", "tandem.sdk.sample_engine", "--model-name", model, "--namespace", model]
        engine += ["--token-interval-ms", f"{self._token_interval_ms:g}"]
        self.workers[name] = await self._start(name, engine)

    async def ready(self) -> None:
        """Wait until just the running workers are registered and the frontend lists both models.

        Raises ServiceError with the end of a log when that takes too long.
        """
        client = OpenAIClient(self.url)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not (await self._all_known() and await self._all_listed(client)):
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            tails = [f"{name}: {child.log_tail()}" for name, child in self.workers.items()]
            raise ServiceError("the cluster was not ready:\n" + "\n".join(tails)) from None
        finally:
            client.close()

    async def instance_id(self, name: str) -> str:
        """Return the instance id of this worker."""
        pid = self.workers[name].pid
        (found,) = [each.instance_id for each in await self._instances() if each.pid == pid]
        return found

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the worker's process."""
        self.workers[name].signal(number)

    async def _start(self, name: str, arguments: list[str]) -> ChildProcess:
        environment = {
            **os.environ,
            "TANDEM_RUNTIME__NATS_URL": self._config.nats_url,
            "TANDEM_RUNTIME__ETCD_ENDPOINTS": self._config.etcd_endpoints,
            "TANDEM_RUNTIME__NAMESPACE": self._config.namespace,
            "TANDEM_RUNTIME__DRAIN_TIMEOUT_S": f"{DRAIN_TIMEOUT_S:g}",
            "TANDEM_RUNTIME__LEASE_TTL_S": "3",
        }
        self._num_started += 1
        log_path = self._run_dir / f"{name}-{self._num_started}.log"
        return await ChildProcess.start([sys.executable, *arguments], log_path, env=environment)

    async def _end_all(self) -> None:
        for child in self.workers.values():
            child.signal(signal.SIGCONT)
        await asyncio.gather(*(child.stop(STOP_TIMEOUT_S) for child in self.workers.values()))

    async def _instances(self) -> list[Instance]:
        found = [await read_instances(self._discovery, model, ["backend"]) for model in MODELS]
        return [instance for of_model in found for instance in of_model.values()]

    async def _all_known(self) -> bool:
        if self._frontend.exit_code is not None:
            raise ServiceError(f"the frontend ended: {self._frontend.log_tail()}")
        running = {child.pid for child in self.workers.values() if child.exit_code is None}
        return {each.pid for each in await self._instances()} == running

    async def _all_listed(self, client: OpenAIClient) -> bool:
        try:
            return {model.id for model in await client.served_models()} == {*MODELS}
        except ServiceError:
            return False
