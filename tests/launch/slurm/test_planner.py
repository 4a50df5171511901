"""A planner in the service job of a real Slurm: it advises, then acts, and follows the services."""

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.slurm.slurm_cluster import processes_of
from tests.launch.slurm.slurm_deployment import COMMAND_S, Tandem
from tests.services import eventually
from tests.stream_load import StreamLoad

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]
NUM_HOSTS, NODE = 2, {"num_cpus": 3}
BOUNDS = ("--planner.min_workers=2", "--planner.max_workers=2")
UP = ("--workers", "1", "--no-standby", "--planner", "advise", *BOUNDS)


async def set_live(tandem: Tandem, key: str, value: str) -> None:
    """Set a live key as docs/slurm.md says."""
    secrets = shlex.quote(str(tandem.state / "secrets"))
    words = [sys.executable, "-P", "-m", "tandem.launch", "config", "set", key, value]
    words += ["--config", str(tandem.state / "config.yaml")]
    words += [f"--runtime.services_file={tandem.state / 'services.json'}"]
    done = await asyncio.to_thread(
        subprocess.run,
        ["bash", "-c", f". {secrets}; {shlex.join(words)}"],
        env=tandem.environment,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    assert done.returncode == 0, done.stderr


async def until_told(tandem: Tandem, sentence: str) -> None:
    """Wait until a planner's last reading has a sentence."""

    async def is_told() -> bool:
        return any(sentence in line for line in await tandem.planner_lines())

    await eventually(is_told, timeout_s=120, pause_s=0.5)


async def test_it_advises_until_it_may_act(tandem: Tandem, load: StreamLoad) -> None:
    await until_told(tandem, "start of 1, role both")
    assert "planner (advise), model: " in (await tandem.command("status")).stdout
    assert len(tandem.jobs()) == 1
    async with load.running() as record:
        await set_live(tandem, "planner.mode", "act")
        await tandem.until_serving(2)
        await until_told(tandem, "last of 1 changes: ")
    record.judge("planner 1, 2")
    assert "started: 1 workers" in (tandem.state / "logs" / "planner.log").read_text()


def names_of(pid: int) -> set[str]:
    """Return the names of a process's variables, but Slurm's."""
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    names = {line.partition("=")[0] for line in variables}
    return {name for name in names if not name.startswith("SLURM")}


async def test_the_workers_that_it_submits_have_the_environment_of_the_others(
    tandem: Tandem,
) -> None:
    first, second = map(names_of, processes_of("tandem.launch worker", tandem.state))
    assert first ^ second <= {"_", "OLDPWD"}


async def test_it_comes_back_with_the_services(tandem: Tandem, load: StreamLoad) -> None:
    before = tandem.services()
    os.kill(tandem.service_process(), signal.SIGKILL)
    await eventually(lambda: tandem.services() != before)
    await load.first_answer_s()
    await tandem.until_serving(2)
    await until_told(tandem, "planner (advise), model: ")  # the mode of `up` again
    assert len(tandem.jobs()) == 2
    async with load.running() as record:
        await set_live(tandem, "planner.mode", "act")
        await set_live(tandem, "planner.min_workers", "3")
        await set_live(tandem, "planner.max_workers", "3")
        await tandem.until_serving(3)
    record.judge("planner 2, 3")
