"""Servers under comparison as real processes: their starts, rests, ends and figures."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from tandem.bench.engines.__main__ import main
from tandem.bench.engines.presets import Case, Engine
from tandem.bench.engines.process import EngineProcess
from tandem.bench.stack.near_zero import write_near_zero_model
from tandem.models.folder import byte_level_tokenizer
from tandem.runtime.errors import ServiceError
from tests.services import eventually

CASE = Case("float32", 1)

# A server on {port} that answers in full, or as its mode's name says. It has a child in a session
# of its own that ignores SIGTERM, as an engine's worker might.
SERVER = """
import asyncio, signal, subprocess, sys
from tests.bench.load import sse_server

mode, port = sys.argv[1], int(sys.argv[2])
worker = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
if mode != "exits":
    subprocess.Popen([sys.executable, "-S", "-c", worker], start_new_session=True)
print("a log line of", mode, flush=True)

async def answer(exchange):
    if mode == "refuses":
        await exchange.send_json(422, {"detail": "unexpected field ignore_eos"})
    elif mode == "falls short" and exchange.body["max_tokens"] > 2:
        exchange.body["max_tokens"] -= 1
        await sse_server.answer_in_full(exchange)
    else:
        await sse_server.answer_in_full(exchange)

async def main():
    if mode == "sleeps":
        await asyncio.Event().wait()
    async with sse_server.serving(answer, port):
        await asyncio.Event().wait()

if mode == "exits":
    sys.exit("no such accelerator")
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def server_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("server") / "server.py"
    path.write_text(SERVER)
    return path


def fake(server_file: Path, mode: str = "serves") -> Engine:
    return Engine("fake", ("{python}", str(server_file), mode, "{port}"))


@asynccontextmanager
async def started(engine: Engine, run_dir: Path) -> AsyncIterator[EngineProcess]:
    process = EngineProcess(engine, CASE, run_dir, run_dir)
    try:
        yield process
    finally:
        await process.stop()


def tree(process: EngineProcess) -> list[psutil.Process]:
    guard = psutil.Process(process._guard.pid)
    return [guard, *guard.children(recursive=True)]


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def test_ready_is_the_first_answer_and_the_end_takes_the_whole_tree(
    tmp_path: Path, server_file: Path
) -> None:
    async with started(fake(server_file), tmp_path) as process:
        await process.wait_until_ready(60)
        assert process.ready_s > 0
        processes = tree(process)
        assert len(processes) == 3  # the guard, the server, its worker
    assert all(is_gone(one) for one in processes)


async def until_stopped(one: psutil.Process) -> None:
    """The signal takes effect when the process next enters the kernel."""
    await eventually(lambda: one.status() == psutil.STATUS_STOPPED, 20)


async def test_a_stopped_server_answers_only_after_it_was_continued(
    tmp_path: Path, server_file: Path
) -> None:
    async with started(fake(server_file), tmp_path) as process:
        await process.wait_until_ready(60)
        process.pause()
        for one in tree(process)[1:]:
            await until_stopped(one)
        asked = asyncio.create_task(process.ask("a", 1))
        await asyncio.wait([asked], timeout=0.3)
        assert not asked.done()
        with process.running():
            assert (await asked).succeeded
        await until_stopped(tree(process)[1])


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("exits", "fake exited with 1 before it served.*no such accelerator"),
        ("refuses", "fake refuses requests: http_422.*ignore_eos.*a log line of refuses"),
        ("sleeps", "fake was not ready after 1 s.*a log line of sleeps"),
    ],
)
async def test_a_server_that_does_not_come_up_is_named_with_the_end_of_its_log(
    tmp_path: Path, server_file: Path, mode: str, words: str
) -> None:
    async with started(fake(server_file, mode), tmp_path) as process:
        if mode == "sleeps":
            await eventually(lambda: "a log line" in process.log_path.read_text(), 60)
        with pytest.raises(ServiceError, match=f"(?s){words}"):
            await process.wait_until_ready(1 if mode == "sleeps" else 60)


def test_servers_end_when_the_tool_is_killed(tmp_path: Path, server_file: Path) -> None:
    script = f"""
import asyncio, signal, sys
from pathlib import Path
from tandem.bench.engines.presets import Case, Engine
from tandem.bench.engines.process import EngineProcess

async def main():
    folder = Path({str(tmp_path)!r})
    engine = Engine("fake", ("{{python}}", {str(server_file)!r}, "serves", "{{port}}"))
    process = EngineProcess(engine, Case("float32", 1), folder, folder)
    await process.wait_until_ready(60)
    process.pause()
    print("ready", flush=True)
    signal.pause()

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        processes = psutil.Process(owner.pid).children(recursive=True)
        assert len(processes) == 3
        os.kill(owner.pid, signal.SIGKILL)
    gone, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive
    assert len(gone) == 3


def run(*words: str) -> int:
    return main([*words, "--dtype", "float32", "--threads", "1"])


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    byte_level_tokenizer(512).save(str(folder / "tokenizer.json"))
    return folder


SMALL = (
    *("--requests", "10", "--alone-requests", "2"),
    *("--input-tokens", "40", "--output-tokens", "8"),
)


@pytest.mark.slow
def test_tandem_and_another_server_are_compared_in_rounds(
    tmp_path: Path, server_file: Path
) -> None:
    model, path = write_near_zero_model(tmp_path / "model"), tmp_path / "out.json"
    words = ["--engine", "tandem", "other", "--output", str(path), "--model", str(model)]
    words += ["--command", f"other={{python}} {server_file} serves {{port}}"]
    started_at = time.perf_counter()
    assert run(*words, *SMALL, "--rounds", "2") == 0
    document = json.loads(path.read_text())
    figures = document["figures"]
    assert document["settings"]["rounds"] == 2
    prefix = "float32_1_thread"
    for name in ("tandem", "other", "vs_other"):
        assert len(figures[f"{prefix}_tokens_per_s_{name}"]["samples"]) == 2
        assert figures[f"{prefix}_tokens_per_s_{name}"]["value"] > 0
    ready = figures[f"{prefix}_ready_s_tandem"]
    assert 0 < ready["value"] < time.perf_counter() - started_at
    assert ready["verdict"] in ("met", "missed")


def test_an_answer_that_is_too_short_ends_the_comparison(
    tokenizer_folder: Path, server_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"mine={{python}} {server_file} 'falls short' {{port}}"
    words = ("--model", str(tokenizer_folder), "--engine", "mine", "--command", command)
    assert run(*words, *SMALL) == 1
    text = capsys.readouterr().out
    assert "mine answered with 7 tokens where 8 were asked for" in text
    assert "a log line of falls short" in text
