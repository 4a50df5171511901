"""The Makefile in a copy: what installing says, and the tests that a change stands for."""

import ensurepip
import os
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NVIDIA = Path("/proc/driver/nvidia/version").exists()
# Of each target: a step of a line, and a word of the command of its last step.
STEPS = {
    "install": (["torch==", "tandem and the rest"], "constraints.txt -e"),
    "install-dev": (["torch==", "tandem and the rest", "tests", "helm"], "kubectl"),
    "vllm": (["vLLM", *([] if NVIDIA else ["without a GPU"]), "tandem"], "--no-deps -e ."),
}
PYTHON = """#!/bin/sh
for line in $(seq 50); do echo "Collecting $line"; done
case "$*" in *"$FAILS"*) echo "WARNING: the network is unreachable" >&2; exit 7;; esac
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what `make install` reads."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "vllm/requirements.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def write_pythons(copy: Path) -> None:
    """Environments whose Python says much, and fails at a step."""
    for name in (".venv", ".venv-vllm"):
        python = copy / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON, encoding="utf-8")
        python.chmod(0o755)


def make(copy: Path, *targets: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run make as a user's shell does, also from a test that make runs."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("BASE", "MAKE", "MFLAGS", "PIP_", "PYTHON", "VENV"))
    }
    return subprocess.run(
        ["make", *targets, "PYTHON=true"],
        cwd=copy, env=kept | settings, text=True, capture_output=True, check=False, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("target", STEPS)
def test_a_step_is_one_line(copy: Path, target: str) -> None:
    write_pythons(copy)
    ended = make(copy, target, FAILS="no step")
    assert (ended.returncode, ended.stderr) == (0, "")
    steps, _ = STEPS[target]
    lines = [line for line in ended.stdout.splitlines() if not line.startswith("creating")]
    assert len(lines) == len(steps)
    for line, step in zip(lines, steps, strict=True):
        assert step in line


@pytest.mark.parametrize("target", STEPS)
def test_a_step_that_fails_says_why_and_where_its_log_is(copy: Path, target: str) -> None:
    write_pythons(copy)
    ended = make(copy, target, FAILS=STEPS[target][1])
    assert ended.returncode == 2
    assert "Error 7" in ended.stderr
    assert "WARNING: the network is unreachable" in ended.stderr
    environment = copy / (".venv-vllm" if target == "vllm" else ".venv")
    assert str((environment / "install.log").relative_to(copy)) in ended.stderr
    assert "Collecting 1\n" not in ended.stderr
    assert "Collecting 1\n" in (environment / "install.log").read_text(encoding="utf-8")
    ready = ".ready-dev" if target == "install-dev" else ".ready"
    assert not (environment / ready).exists()


def test_a_network_that_refuses_is_named(copy: Path) -> None:
    """By the pip that comes with Python, which any `make install` starts with."""
    bundled = sorted((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
    if not bundled:
        pytest.skip("this Python comes without pip")
    venv.create(copy / ".venv", symlinks=True)
    [packages] = (copy / ".venv").glob("lib/python*/site-packages")
    (packages / "pip.pth").write_text(f"{bundled[-1]}\n", encoding="utf-8")
    ended = make(
        copy, "install",
        PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_RETRIES="1", PIP_CONFIG_FILE=os.devnull,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "Connection refused" in ended.stderr
    assert not (copy / ".venv" / ".ready").exists()


def test_what_changed_stands_for_the_tests_of_its_rooms(copy: Path) -> None:
    def git(*words: str) -> None:
        person = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *person, *words], cwd=copy, check=True, capture_output=True)

    def write(name: str) -> None:
        file = copy / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{name} {file.exists()}\n", encoding="utf-8")

    rooms = ("router", "queue", "engine", "frontend", "decode")
    for room in rooms:
        write(f"{room}/__init__.py")
        write(f"tests/{room}/test_it.py")
    write("tests/test_layout.py")
    git("init", "-b", "main")
    git("add", ".")
    git("commit", "-m", "a tree")
    git("checkout", "-b", "mine")
    write("router/__init__.py")
    git("commit", "-am", "committed")
    write("tests/queue/test_it.py")  # not committed
    write("engine/core/new.py")  # not known to git
    write("docs/page.md")  # has no tests
    git("checkout", "main")
    git("commit", "--allow-empty", "-m", "main goes on")
    git("checkout", "mine")
    command = make(copy, "-n", "test-changed").stdout.splitlines()[-2]
    tests = [word for word in command.split() if word.startswith("tests/")]
    assert sorted(tests) == [
        "tests/engine", "tests/queue", "tests/router", "tests/test_layout.py"
    ]  # fmt: skip
