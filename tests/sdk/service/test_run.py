"""`tandem run` end to end, on the examples: real services, real processes."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tandem.launch.cli.main import main
from tests.processes import line_until

EXAMPLES = Path(__file__).parents[3] / "examples"
END_TIMEOUT_S = 60.0


def found_from() -> str:
    """Return PYTHONPATH for a process in another folder."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join(str(Path(path).resolve()) for path in paths)


class Running:
    """A `tandem run` in a process of its own, and its output so far."""

    def __init__(self, example: str, state: Path, *arguments: str) -> None:
        self.folder = EXAMPLES / example
        self.environment = os.environ | {"XDG_STATE_HOME": str(state), "PYTHONPATH": found_from()}
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [*self.tandem("run"), *arguments, "--run-dir", str(state / "run")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env=self.environment,
        )

    @staticmethod
    def tandem(command: str) -> list[str]:
        return [sys.executable, "-P", "-m", "tandem.launch", command]

    def until(self, pattern: str) -> re.Match[str]:
        """Read lines until one matches. Fail at the process's end."""
        return line_until(pattern, self.process, self.lines)

    def pid_of(self, name: str) -> int:
        """Return the pid of an instance, from the status lines."""
        found = re.findall(rf"{name} is ready \(.*pid (\d+)\)", "".join(self.lines))
        return int(found[-1])

    def client(self, *words: str) -> str:
        """Return the output of the example's client."""
        return subprocess.run(
            [sys.executable, "client.py", *words],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=END_TIMEOUT_S,
        ).stdout

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture(scope="module")
def hello(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The hello world of the examples; the module's last test ends it."""
    running = Running(
        "hello_world",
        tmp_path_factory.mktemp("hello"),
        *("hello_world:Frontend", "-f", "config.yaml", "--Common.greeting=Howdy"),
        "--Backend.ServiceArgs.workers=1",
    )
    try:
        running.until("Ctrl-C stops")
        yield running
    finally:
        running.close()


def test_every_instance_has_one_line_and_the_graph_answers(hello: Running) -> None:
    ready = [line for line in hello.lines if " is ready " in line]
    names = sorted(re.findall(r"(\w+-\d) is ready", "".join(ready)))
    assert names == ["Backend-0", "Frontend-0", "Middle-0"]
    assert hello.client("it", "works") == "Howdy IT WORKS \n"


def test_an_instance_that_dies_is_started_again(hello: Running) -> None:
    killed = hello.pid_of("Backend-0")
    os.kill(killed, signal.SIGKILL)
    hello.until("Backend-0 was killed by signal 9; starting it again")
    hello.until("Backend-0 is ready")
    assert hello.pid_of("Backend-0") != killed


def test_one_interrupt_ends_everything(hello: Running) -> None:
    children = psutil.Process(hello.process.pid).children(recursive=True)
    assert len(children) == 5  # NATS, etcd and three instances
    hello.process.send_signal(signal.SIGINT)
    hello.until("stopped; nothing is left running")
    assert hello.process.wait(timeout=END_TIMEOUT_S) == 0
    assert psutil.wait_procs(children, timeout=END_TIMEOUT_S)[1] == []


@pytest.mark.slow
def test_a_custom_router_sends_a_prompt_where_its_blocks_are(tmp_path: Path) -> None:
    running = Running("custom_router", tmp_path, "custom_router:Frontend")
    try:
        running.until("Ctrl-C stops")
        first, again = running.client().splitlines(), running.client().splitlines()
    finally:
        running.close()
    assert len(first) == len(again) == 8  # four prompts, each sent twice
    assert all(line.endswith("0 of 10 blocks cached") for line in first[:4])
    assert all(line.endswith("10 of 10 blocks cached") for line in again)
    workers = {line.partition(" worker ")[2].partition(",")[0] for line in again}
    assert len(workers) == 2


# ---- what is refused before anything starts ---------------------------------------------------

GRAPH = """
from tandem.sdk import depends, endpoint
from tandem.sdk import service

@service(resources={"gpu": "99"})
class Greedy:
    @endpoint()
    async def generate(self, request: str) -> str:
        return request

@service
class Front:
    greedy = depends(Greedy)

class Plain: ...
"""


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str]]]:
    """`tandem run` in this process and in a folder with GRAPH in it: exit code and last line."""
    (tmp_path / "refused_graph.py").write_text(GRAPH)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["tandem", "run", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capsys.readouterr().err.strip().splitlines()[-1]

    yield call
    sys.modules.pop("refused_graph", None)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nowhere:Front"], "error: no module 'nowhere' here"),
        (["refused_graph"], "error: 'refused_graph' must read module:Class"),
        (["refused_graph:Fornt"], "error: refused_graph has no class Fornt; it has Greedy, Front"),
        (["refused_graph:Plain"], "error: Plain is not a service: decorate it with @service"),
        (["refused_graph:Front"], "error: Greedy asks for 99 GPUs"),
        (["refused_graph:Front", "--Gredy.x=1"], "flag --Gredy.x: unknown key 'Gredy'; did you m"),
        (["refused_graph:Front", "-f", "no.yaml"], "error: cannot read no.yaml"),
    ],
)
def test_an_error_is_one_line_that_says_what_to_do(
    run: Callable[..., tuple[int, str]], arguments: list[str], reason: str
) -> None:
    code, line = run(*arguments)
    assert code == 2
    assert reason in line
