"""`tandem serve` end to end: real services, real roles, the bundled model."""

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tandem.models.paths import BUNDLED_MODEL
from tandem.runtime.bus.nats import NatsConnection
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ProtocolError, ServiceError
from tandem.runtime.plane.client import RequestClient
from tests.launch.conftest import Tandem
from tests.processes import line_until

READY_TIMEOUT_S = 60.0


class Served:
    """A `tandem serve` in a process of its own, and what it has said so far."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.lines: list[str] = []
        command = [sys.executable, "-P", "-m", "tandem.launch", "serve", "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--run-dir", str(folder / "run"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"XDG_STATE_HOME": str(folder / "state")},
        )

    def until(self, pattern: str) -> re.Match[str]:
        """Reads on until a line matches. The process's end, or the test's timeout, fails it."""
        return line_until(pattern, self.process, self.lines)

    def children(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=READY_TIMEOUT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None and not self.process.stdout.closed:
            self.lines += self.process.stdout.readlines()
            self.process.stdout.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two workers of both roles and a planner, for the tests that leave them as they were."""
    planner = ("--planner", "advise", "--planner.interval_s", "0.5")
    served = Served(tmp_path_factory.mktemp("served"), *planner)
    try:
        served.until("Ctrl-C stops")
        yield served
    finally:
        served.close()


Start = Callable[..., Served]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a topology of the test's own; kills what is left of it."""
    started: list[Served] = []

    def run(*arguments: str) -> Served:
        started.append(Served(tmp_path, *arguments))
        return started[-1]

    yield run
    for served in started:
        served.close()


Command = Callable[..., str]


@pytest.fixture
def command(served: Served, tandem: Tandem, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The output of another `tandem` command, which finds the cluster by itself."""
    monkeypatch.setenv("XDG_STATE_HOME", str(served.folder / "state"))

    def run(*arguments: str) -> str:
        code, output, errors = tandem(*arguments)
        assert code == 0, errors
        return output

    return run


def answer_to(curl_line: str) -> dict[str, object]:
    """Sends what the printed curl line would send."""
    words = shlex.split(curl_line)
    headers = dict(h.split(": ", 1) for flag, h in pairwise(words) if flag == "-H")
    body = words[words.index("-d") + 1].encode()
    request = urllib.request.Request(words[1], body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            answer: dict[str, object] = json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(f"{error.code}: {error.read().decode()}") from None
    return answer


def test_the_printed_curl_line_gets_an_answer(served: Served) -> None:
    line = next(line for line in served.lines if line.startswith("curl "))
    answer = answer_to(line)
    assert answer["model"] == "tandem-tiny"
    assert "content" in json.dumps(answer["choices"])


def test_the_printed_link_opens_the_live_page_and_nothing_else_has_its_key(
    served: Served, command: Command
) -> None:
    (link,) = [line.split()[-1] for line in served.lines if "live page: " in line]
    page, _, key = link.partition("#key=")
    stream = urllib.request.Request(f"{page}/states", headers={"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(stream, timeout=60) as response:
        assert b"workers" in response.readline()
    stream.remove_header("Authorization")
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        urllib.request.urlopen(stream, timeout=60)
    refused.value.close()
    commands = [" ".join(psutil.Process(pid).cmdline()) for pid in served.children()]
    logs = [path.read_text() for path in (served.folder / "run").glob("*.*")]
    for text in (*commands, *logs, command("config", "show")):
        assert key not in text


def test_status_finds_the_cluster_and_shows_every_role(served: Served, command: Command) -> None:
    report = json.loads(command("status", "--json"))
    states = [
        (r["state"], r["worker"]["load"]["role"] if r["worker"] else "")
        for r in report["instances"]
    ]
    assert sorted(states) == [("ready", ""), ("serving", "both"), ("serving", "both")]
    assert [(q["model"], q["num_jobs"], q["error"]) for q in report["queues"]] == [
        ("tandem-tiny", 0, "")
    ]
    text = command("status")
    assert "thresholds: policy" in text
    assert "prefill queue of tandem-tiny: 0 jobs" in text


def test_status_shows_what_a_planner_beside_the_workers_sees(
    served: Served, command: Command
) -> None:
    expected = "planner (advise), tandem-tiny: every worker takes prompts as they come"
    deadline_s = time.perf_counter() + READY_TIMEOUT_S
    while expected not in (text := command("status")):
        assert time.perf_counter() < deadline_s, text


def test_a_command_reaches_the_worker_that_it_names(served: Served, command: Command) -> None:
    report = json.loads(command("status", "--json"))
    ids = [r["instance"]["instance_id"] for r in report["instances"] if r["worker"]]
    out = command("control", ids[0], "clear-prefix-cache")
    assert out.endswith("cached blocks are free\n")


def test_other_users_of_the_machine_reach_nothing_but_http(
    served: Served, command: Command
) -> None:
    token_file, *_ = (served.folder / "run").glob("cluster_token")
    records = [*(served.folder / "state").rglob("*.json")]
    assert {path.stat().st_mode & 0o777 for path in (token_file, *records)} == {0o600}
    cluster = json.loads(records[0].read_text())
    password = cluster["nats_url"].partition(":")[2].partition(":")[2].partition("@")[0]
    token = token_file.read_text()
    commands = [" ".join(psutil.Process(pid).cmdline()) for pid in served.children()]
    logs = [path.read_text() for path in (served.folder / "run").glob("*.log")]
    status = command("status", "--json")
    shown = [command("config", "show"), status, *served.lines]
    for text in (*commands, *logs, *shown):
        assert token not in text and password not in text
    socket = Path(cluster["etcd_endpoints"].removeprefix("unix://"))
    assert socket.is_socket() and socket.parent.stat().st_mode & 0o777 == 0o700
    etcd = next(psutil.Process(p) for p in served.children() if psutil.Process(p).name() == "etcd")
    assert not etcd.net_connections(kind="inet")
    asyncio.run(refuses_strangers(cluster["nats_url"].replace(password, "guess"), status))


async def refuses_strangers(nats_url: str, status: str) -> None:
    with pytest.raises(ServiceError, match=r"(?i)authorization"):
        await NatsConnection(RuntimeConfig(nats_url=nats_url, connect_attempts=5)).start()
    report = json.loads(status)
    client = RequestClient(RuntimeConfig(), "a stranger")
    instances = [process["instance"] for process in report["instances"]]
    workers = [instance for instance in instances if instance["component"] != "frontend"]
    assert len(workers) == 2
    for worker in workers:
        with pytest.raises(ProtocolError, match="refused the cluster token"):
            await client.call(worker["address"], "status", b"", RequestContext())
    await client.close()


def test_a_live_threshold_is_in_force_at_the_workers_within_a_second(
    served: Served, command: Command
) -> None:
    before = json.loads(command("status", "--json"))["thresholds"]
    assert "ttft_target_ms" not in before, "it is not set"
    command("config", "set", "disagg.ttft_target_ms", "900")
    command("config", "set", "disagg.max_local_prefill_length", "77")
    deadline_s = time.perf_counter() + 5
    log = served.folder / "run" / "worker-0.log"
    while "max_local_prefill_length is now 77" not in log.read_text():
        assert time.perf_counter() < deadline_s
        time.sleep(0.01)
    report = json.loads(command("status", "--json"))
    assert report["thresholds"] == before | {"max_local_prefill_length": 77, "ttft_target_ms": 900}
    command("config", "unset", "disagg.ttft_target_ms")
    command("config", "unset", "disagg.max_local_prefill_length")


@pytest.mark.slow
def test_a_role_that_dies_is_started_again_and_it_is_said(served: Served) -> None:
    pid = next(
        int(match[1])
        for line in served.lines
        if (match := re.search(r"worker-0.* pid (\d+)", line))
    )
    os.kill(pid, signal.SIGKILL)
    served.until("worker-0 was killed by signal 9; starting it again")
    assert int(served.until(r"worker-0 is ready .*pid (\d+)")[1]) != pid


def test_a_launcher_that_is_killed_while_it_starts_leaves_nothing(
    start: Start, wait_until_gone: Callable[[Sequence[int]], None]
) -> None:
    served = start("--topology", "aggregated", "--emulate", "h100/llama-3.1-8b")
    served.until("loading llama-3.1-8b")
    children = served.children()
    assert len(children) == 4  # nats, etcd, frontend, an emulated worker
    assert served.end(signal.SIGKILL) == -signal.SIGKILL
    wait_until_gone(children)


@pytest.mark.slow
def test_a_role_that_cannot_start_shows_the_end_of_its_log(start: Start, tmp_path: Path) -> None:
    model = tmp_path / "broken"
    model.mkdir()
    shutil.copy(BUNDLED_MODEL / "config.json", model)
    served = start(str(model), "--topology", "aggregated")
    served.until(r"^error: decode-0 exited with 1 while starting; its log, .*decode-0.log, ends:")
    served.until(r"^error: model folder .*broken has no tokenizer.json")
    assert served.process.wait(timeout=READY_TIMEOUT_S) == 1


def test_one_interrupt_drains_it_and_leaves_nothing(
    served: Served, wait_until_gone: Callable[[Sequence[int]], None]
) -> None:
    """The last test of `served`."""
    children = served.children()
    assert len(children) == 7  # nats, etcd, frontend, planner, what two workers are forks of
    assert served.end(signal.SIGINT) == 0
    wait_until_gone(children)
    served.close()
    assert "stopped; nothing is left running" in "".join(served.lines)
    assert not list((served.folder / "run").glob("*-store-*"))
