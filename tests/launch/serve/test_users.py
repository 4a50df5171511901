"""`tandem` for users and terminals that are not like a developer's."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tandem.models.paths import BUNDLED_MODEL
from tests.processes import line_until

UID = 123_456  # of no entry in passwd
TANDEM = (sys.executable, "-P", "-m", "tandem.launch")
# The right to read anything, which lets that user run an environment below another's home.
SETPRIV = (
    *("setpriv", f"--reuid={UID}", "--regid=0", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
)
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def needs_setpriv() -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    command = [*SETPRIV, sys.executable, "-c", "pass"]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not become another one")


class Stranger:
    """A user without a home, in an ASCII locale, whose TMPDIR is too long for sockets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / ("x" * 90)
        self.folder.mkdir()
        os.chown(self.folder, UID, 0)
        given = os.environ | ASCII | {"TMPDIR": str(self.folder), "CC": "no-compiler"}
        self.variables = {
            name: value
            for name, value in given.items()
            if name not in ("HOME", "USER", "LOGNAME") and not name.startswith("XDG_")
        }

    @contextmanager
    def started(
        self, *words: str, more: Mapping[str, str] | None = None
    ) -> Iterator["subprocess.Popen[str]"]:
        process = subprocess.Popen(
            [*SETPRIV, *TANDEM, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            env=self.variables | dict(more or {}),
            cwd="/",
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate()
        assert process.returncode == 0

    def run(self, *words: str) -> tuple[str, str]:
        done = subprocess.run(
            [*SETPRIV, *TANDEM, *words],
            capture_output=True,
            text=True,
            encoding="utf-8",
            env=self.variables,
            cwd="/",
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that every user may enter; pytest's own is private."""
    with tempfile.TemporaryDirectory(prefix="tandem-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_user_without_a_home_can_do_everything(shared_folder: Path) -> None:
    needs_setpriv()
    stranger = Stranger(shared_folder)
    model = shared_folder / "modèle"
    shutil.copytree(BUNDLED_MODEL, model)
    home, lines = stranger.folder / f"tandem-{UID}", []
    with ExitStack() as stack:
        serving = stranger.started(
            "serve", str(model), "--workers", "1", "--port", "0", more={"HOME": "/"}
        )
        served = stack.enter_context(serving)
        url = line_until(r"ready: (\S+) serves modèle", served, lines)[1]
        line_until("Ctrl-C stops", served, lines)
        warnings = [line for line in lines if "the home / cannot be written to" in line]
        assert len(warnings) == 1 and str(home) in warnings[0]
        assert home.stat().st_mode & 0o777 == 0o700 and home.stat().st_uid == UID
        out, err = stranger.run("status", "--json")
        assert err.count("this user has no home") == 1
        (worker,) = {i["instance"].get("model", "") for i in json.loads(out)["instances"]} - {""}
        assert worker == "modèle"
        out, _ = stranger.run("bench", "--num-requests", "2", "--output-tokens", "4")
        assert f"modèle at {url}" in out
        etcd = [
            "--etcd-endpoints",
            json.loads(stranger.run("status", "--json")[0])["etcd_endpoints"],
        ]
        frontend = stack.enter_context(stranger.started("frontend", "--port", "0", *etcd))
        line_until("listens on", frontend, [])
        worker = stack.enter_context(stranger.started("worker", str(model), *etcd))
        line_until("serves modèle", worker, [])


def test_names_are_utf_8_in_any_locale(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-I",  # without the variables of Python, which may ask for it
            *TANDEM[2:],
            "config",
            "show",
            "--no-live",
            "--json",
            "--engine.model=modèle",
        ],
        capture_output=True,
        check=True,
        env=os.environ | ASCII | {"XDG_STATE_HOME": str(tmp_path)},
    )
    assert json.loads(done.stdout)["engine.model"]["value"] == "modèle"


def test_a_closed_terminal_drains_and_leaves_nothing(
    tmp_path: Path, wait_until_gone: Callable[[Sequence[int]], None]
) -> None:
    terminal, end = os.openpty()
    serve = [*TANDEM, "serve", "--port", "0", "--topology", "aggregated"]
    serve += ["--emulate", "h100/llama-3.1-8b"]
    process = subprocess.Popen(
        ["setsid", "--ctty", *serve],
        stdin=end,
        stdout=end,
        stderr=end,
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
    )
    os.close(end)
    shown = b""
    while b"frontend-0" not in shown:
        shown += os.read(terminal, 4096)
    children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    os.close(terminal)
    assert process.wait() == 0
    wait_until_gone(children)
