"""Children that are forks: each is what the process of its command would be."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from tandem.launch.serve.role_process import MODULES
from tandem.launch.supervise.managed_process import ManagedProcess
from tandem.runtime.errors import ServiceError
from tandem.runtime.local.child_process import PIPE, ChildProcess
from tandem.runtime.local.fork_server import ForkServer
from tests.services import eventually

pytestmark = pytest.mark.asyncio
SLOW = "import sys\nprint('imported', file=sys.stderr)\nVERSION = 1\n"
TELL = """
    import json, os, sys, slow_import
    print(json.dumps([sys.argv[1:], os.environ["WORD"], os.environ.get("FORMER"),
        os.getpid() == os.getsid(0), sys.stdin.read(), slow_import.VERSION, os.getppid()]))
    sys.exit(3)
"""
SLEEP = "import time\nprint('sleeps', flush=True)\ntime.sleep(600)\n"


@pytest_asyncio.fixture
async def forks(tmp_path: Path) -> AsyncIterator[ForkServer]:
    """A server of forks whose modules lie in a folder of the test."""
    for name, text in {"slow_import": SLOW, "tell": TELL, "sleep": SLEEP}.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "FORMER": "of the imports"}
    server = ForkServer(["slow_import"], environment, tmp_path / "forks.log")
    yield server
    server.close()


def environment() -> dict[str, str]:
    return {**os.environ, "WORD": "own"}


def command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", module, *arguments]


async def told(forks: ForkServer, tmp_path: Path) -> list[object]:
    log = tmp_path / "told.log"
    child = await forks.start(command("tell", "--flag", "a b"), log, environment())
    assert await child.wait() == 3
    found = json.loads(log.read_text().splitlines()[-1])
    assert isinstance(found, list)
    return found


async def sleeping(forks: ForkServer, tmp_path: Path, name: str = "sleep") -> ChildProcess:
    log = tmp_path / f"{name}.log"
    child = await forks.start(command("sleep", name), log, environment())
    await eventually(lambda: "sleeps" in log.read_text())
    return child


async def test_a_fork_has_what_its_command_would_have(forks: ForkServer, tmp_path: Path) -> None:
    first = await told(forks, tmp_path)
    assert first[:-1] == [["--flag", "a b"], "own", None, True, "", 1]
    assert first[-1] == os.getpid()
    assert await told(forks, tmp_path) == first
    assert (tmp_path / "forks.log").read_text() == "imported\n", "once"


async def test_a_child_is_ended_like_any_other(forks: ForkServer, tmp_path: Path) -> None:
    one, two = await sleeping(forks, tmp_path, "one"), await sleeping(forks, tmp_path, "two")
    assert " ".join(psutil.Process(one.pid).cmdline()).rstrip() == "python -m sleep one"
    assert one.exit_code is None and two.exit_code is None
    assert await one.stop(60.0) and one.exit_code == -signal.SIGTERM
    two.kill()
    assert await two.wait() == -signal.SIGKILL
    one.signal(signal.SIGTERM)  # no effect, and nobody else's process
    assert await told(forks, tmp_path)


async def test_its_end_costs_the_present_children_nothing(
    forks: ForkServer, tmp_path: Path
) -> None:
    elder = await sleeping(forks, tmp_path)
    server = next(each for each in psutil.Process().children() if "slow_import" in each.cmdline())
    server.kill()
    with pytest.raises(ServiceError, match=r"no fork, see .*forks\.log"):
        await forks.start(command("tell"), tmp_path / "log", environment())
    (tmp_path / "slow_import.py").write_text("VERSION = 'another'\n")
    assert (await told(forks, tmp_path))[5] == "another"
    forks.close()
    (tmp_path / "slow_import.py").write_text("VERSION = 'a third one'\n")  # bytecode goes by size
    assert (await told(forks, tmp_path))[5] == "a third one"
    assert elder.exit_code is None
    assert await elder.stop(60.0) and elder.exit_code == -signal.SIGTERM


async def test_what_cannot_be_imported_is_in_its_log_and_the_command_runs_by_itself(
    forks: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "slow_import.py").write_text("raise OSError('a broken library')\n")
    with pytest.raises(ServiceError, match="no fork, see"):
        await forks.start(command("sleep"), tmp_path / "log", environment())
    assert "OSError: a broken library" in (tmp_path / "forks.log").read_text()
    own = {**environment(), "PYTHONPATH": str(tmp_path)}
    process = ManagedProcess(
        "sleep-0", "sleep", command("sleep"), own, tmp_path, placement="CPU", forks=forks
    )
    await process.start()
    await eventually(lambda: "sleeps" in process.log_path.read_text())
    assert "-P" in psutil.Process(process.child.pid).cmdline()
    process.kill()
    await process.child.wait()


async def test_whoever_started_it_takes_all_along(tmp_path: Path) -> None:
    (tmp_path / "sleep.py").write_text(SLEEP)
    script = f"""
import asyncio, os
from pathlib import Path
from tandem.runtime.local.fork_server import ForkServer

async def main():
    folder = Path({str(tmp_path)!r})
    environment = {{**os.environ, "PYTHONPATH": str(folder)}}
    forks = ForkServer([], environment, folder / "forks.log")
    child = await forks.start(["python", "-m", "sleep"], folder / "sleep.log", environment)
    print(child.pid, flush=True)
    await child.wait()

asyncio.run(main())
"""
    starter = await ChildProcess.start_piped([sys.executable, "-P", "-c", script], stdout=PIPE)
    assert starter.stdout is not None
    child = psutil.Process(int(await starter.stdout.readline()))
    both = psutil.Process(starter.pid).children()
    assert child in both and len(both) == 2
    starter.kill()
    await starter.wait()
    await eventually(lambda: not any(map(is_alive, both)))


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


async def test_what_workers_import_starts_no_thread_and_opens_no_transport() -> None:
    script = f"""
import importlib, os
for module in {MODULES}:
    importlib.import_module(module)
loaded = open("/proc/self/maps").read()
print(len(os.listdir("/proc/self/task")), "libucp" in loaded, "libcuda.so" in loaded)
"""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-P", "-c", script],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stdout == "1 False False\n"
