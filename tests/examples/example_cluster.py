"""A cluster for the examples: NATS, etcd and a frontend, as real processes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from tandem.runtime.address import new_id
from tests.services import EtcdServer, NatsServer, free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 60.0


class Example:
    """A running process of an example."""

    def __init__(self, folder: str, command: list[str], environment: dict[str, str], log: Path):
        self._log, self._errors = log, log.with_suffix(".errors")
        self.is_ended = False
        with self._log.open("wb") as output, self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=EXAMPLES / folder,
                env=environment,
                stdout=output,
                stderr=errors,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def check(self) -> None:
        """Check that it has not ended by itself."""
        assert self.is_ended or self.process.poll() is None, self._errors.read_text()

    def kill(self) -> None:
        self.is_ended = True
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Send SIGTERM; return the exit status."""
        self.is_ended = True
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)


class ExampleCluster:
    """The processes of examples, and requests to their frontend."""

    def __init__(self, nats: NatsServer, etcd: EtcdServer, logs: Path) -> None:
        self.port = free_port()
        self.nats, self.etcd = nats, etcd
        self.namespace = new_id()
        self._logs = logs
        self._running: list[Example] = []
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": "1",
            "NATS_SERVER": nats.url,
            "ETCD_ENDPOINTS": etcd.url,
            "TANDEM_RUNTIME__NAMESPACE": self.namespace,
        }

    def start(self, folder: str, *command: str) -> Example:
        """Run `python *command` in the folder of an example."""
        log = self._logs / f"{len(self._running)}.log"
        self._running.append(Example(folder, list(command), self.environment, log))
        return self._running[-1]

    def start_frontend(self) -> Example:
        services = ["--nats-url", self.nats.url, "--etcd-endpoints", self.etcd.url]
        place = ["--namespace", self.namespace, "--port", str(self.port)]
        return self.start(".", "-m", "tandem.launch", "frontend", *services, *place)

    def end(self) -> None:
        for example in reversed(self._running):
            example.end()

    async def models(self, http: aiohttp.ClientSession) -> set[str]:
        """Return the models of the frontend; none before it has started."""
        try:
            async with http.get(f"http://127.0.0.1:{self.port}/v1/models") as answer:
                return {model["id"] for model in (await answer.json())["data"]}
        except aiohttp.ClientConnectionError:
            return set()

    async def wait_for_models(self, http: aiohttp.ClientSession, *names: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while await self.models(http) != set(names):
            for example in self._running:
                example.check()
            assert time.monotonic() < deadline, await self.models(http)
            await asyncio.sleep(0.02)

    async def complete(
        self, http: aiohttp.ClientSession, route: str = "completions", **body: Any
    ) -> dict[str, Any]:
        async with http.post(f"http://127.0.0.1:{self.port}/v1/{route}", json=body) as answer:
            text = await answer.text()
            assert answer.status == 200, text
            parsed: dict[str, Any] = json.loads(text)
            return parsed
