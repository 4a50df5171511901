"""`tandem rollout`: every process of a `tandem serve` replaced under load."""

import asyncio
import json
import os
import sys
from pathlib import Path

import httpx
import pytest

from tandem.runtime.local.child_process import PIPE, ChildProcess
from tests.e2e.serving import serving
from tests.processes import output_of

NUM_REQUESTS = 600
CALLERS = 4


async def tandem(folder: Path, *words: str) -> tuple[int, str]:
    """Run a command that finds the cluster; return its exit code and all that it printed."""
    command = [sys.executable, "-P", "-m", "tandem.launch", *words]
    environment = os.environ | {"XDG_STATE_HOME": str(folder / "state")}
    process = await ChildProcess.start_piped(command, stdout=PIPE, stderr=PIPE, env=environment)
    out, error = await output_of(process)
    return await process.wait(), (out + error).decode()


async def pids(folder: Path) -> set[int]:
    """Return the processes of all instances."""
    _, text = await tandem(folder, "status", "--json")
    return {each["instance"]["pid"] for each in json.loads(text)["instances"]}


def body_of(number: int) -> dict[str, object]:
    """Return one of eight requests; short prompts stay local, long ones are prefilled remotely."""
    prompt = f"{number % 8} " + "one two three " * (60 if number % 2 else 2)
    return {"model": "tandem-tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0}


class Load:
    """Callers that ask one after another: half of them on a new connection each time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.references: list[str] = []
        self.wrong: list[str] = []
        self.num_right = 0
        self.may_end = asyncio.Event()

    async def learn(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=60) as client:
            self.references = [await self._ask(client, number) for number in range(8)]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for caller in range(CALLERS):
                group.create_task(self._call(caller))

    async def _call(self, caller: int) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=60) as kept:
            number = caller
            while not self.may_end.is_set() or self.num_right + len(self.wrong) < NUM_REQUESTS:
                await self._check(kept, number, ends_connection=caller % 2 == 0)
                number += CALLERS + 1

    async def _check(
        self, client: httpx.AsyncClient, number: int, *, ends_connection: bool
    ) -> None:
        try:
            text = await self._ask(client, number, ends_connection=ends_connection)
        except httpx.HTTPError as error:
            self.wrong.append(repr(error))
            return
        if text == self.references[number % 8]:
            self.num_right += 1
        else:
            self.wrong.append(text)

    async def _ask(
        self, client: httpx.AsyncClient, number: int, *, ends_connection: bool = False
    ) -> str:
        headers = {"connection": "close"} if ends_connection else {}
        answer = await client.post("/v1/completions", json=body_of(number), headers=headers)
        if answer.status_code != 200:
            return answer.text
        return str(answer.json()["choices"][0]["text"])


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_every_process_is_replaced_under_load_without_a_failed_request(
    tmp_path: Path,
) -> None:
    flags = ("--planner", "advise", "--disagg.max_local_prefill_length=64")
    async with serving("disagg-1p1d", tmp_path, *flags) as url:
        load, before = Load(url), await pids(tmp_path)
        await load.learn()
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run())
            code, text = await tandem(tmp_path, "rollout")
            load.may_end.set()
        assert code == 0, text
        assert text.endswith("every process is replaced\n")
        assert not before & await pids(tmp_path)
        assert (load.wrong, load.num_right >= NUM_REQUESTS) == ([], True)
