"""`tandem serve --planner act`: workers that start under load and end again."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest

from tandem.launch.serve.control import command
from tandem.runtime.errors import ServiceError
from tests.e2e.serving import serving
from tests.e2e.test_rollout import pids, tandem

EMULATED = "h100/llama-3.1-70b"  # a prompt of 1,500 tokens takes 0.15 s there, and no core
CALLERS = 40
BODY = {"model": "llama-3.1-70b", "max_tokens": 4, "ignore_eos": True}


class Load:
    """Callers that ask one after another, each with a prompt that no worker has cached."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.num_right = 0
        self.wrong: list[str] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        may_end = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for caller in range(CALLERS):
                group.create_task(self._call(caller, may_end))
            yield
            may_end.set()

    async def _call(self, caller: int, may_end: asyncio.Event) -> None:
        async with aiohttp.ClientSession() as http:
            number = 0
            while not may_end.is_set():
                number += 1
                prompt = [3 + caller, 3 + number % 900, *range(3, 1500)]
                answer = await http.post(
                    f"{self._url}/v1/completions", json=BODY | {"prompt": prompt}
                )
                text = await answer.text()
                if answer.status == 200 and json.loads(text)["usage"]["completion_tokens"] == 4:
                    self.num_right += 1
                else:
                    self.wrong.append(text)


async def until_told(folder: Path, sentence: str) -> None:
    """Wait until `tandem status` has a sentence."""
    async with asyncio.timeout(60):
        while sentence not in (await tandem(folder, "status"))[1]:
            await asyncio.sleep(0.5)


async def until_counted(folder: Path, count: int) -> None:
    """Wait until so many processes serve: workers, and one frontend."""
    async with asyncio.timeout(180):
        while len(await pids(folder)) != count + 1:
            await asyncio.sleep(0.5)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_workers_start_under_load_and_end_when_fewer_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("roles: {frontend: {count: 1}, worker: {count: 1}}\n")
    flags = ("--emulate", EMULATED, "--planner", "act", "--planner.max_workers=2")
    async with serving(str(tmp_path / "one.yaml"), tmp_path, *flags) as url:
        before = await pids(tmp_path)
        load = Load(url)
        async with load.running():
            await until_counted(tmp_path, 2)
            await until_told(tmp_path, "last of 1 changes: 1 workers of both roles are")
        # of their own accord they end after a minute
        code, text = await tandem(tmp_path, "config", "set", "planner.max_workers", "1")
        assert code == 0, text
        await until_counted(tmp_path, 1)
        assert (load.wrong, load.num_right > 0) == ([], True)
        await until_told(tmp_path, "last of 2 changes: 2 workers of both roles are")
        lines = (tmp_path / "serve.log").read_text()
        assert "worker-1: asked for, starting" in lines and " has ended, as asked for" in lines
        assert "starting it again" not in lines
        assert len(before & await pids(tmp_path)) >= 1  # the frontend
        async with load.running():
            await asyncio.sleep(1)
        assert load.wrong == []


def control_of(folder: Path) -> Path:
    """Return the control socket of the only cluster that is announced in a folder."""
    [record] = (folder / "state").rglob("clusters/*.json")
    return Path(json.loads(record.read_text())["control"])


async def process_of(config: Path) -> psutil.Process:
    """Return the process that runs with a config file, once there is one."""
    async with asyncio.timeout(60):
        while True:
            for process in psutil.process_iter(["cmdline"]):
                if str(config) in (process.info["cmdline"] or ()):
                    return process
            await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_worker_that_dies_while_it_starts_ends_nothing_else(tmp_path: Path) -> None:
    async with serving("workers", tmp_path, "--emulate", EMULATED):
        control, before = control_of(tmp_path), await pids(tmp_path)
        start = asyncio.create_task(command(control, "start both 1"))
        (await process_of(tmp_path / "run" / "worker-2.yaml")).kill()
        with pytest.raises(ServiceError, match="the new process of worker-2 was killed"):
            await start
        with pytest.raises(ServiceError, match="no worker of this `tandem serve` has"):
            await command(control, "stop 1")
        with pytest.raises(ServiceError, match="start ROLE COUNT"):
            await command(control, "start frontend 1")
        assert await pids(tmp_path) == before
        assert await command(control, "start both 1") == "worker-2"
        [new] = await pids(tmp_path) - before
        assert await command(control, f"stop {new}") == "worker-2"
        assert not psutil.pid_exists(new)
        assert await pids(tmp_path) == before
