"""The rooms, the arrows between them, and what no code of ours may do."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "runtime": set(),
    "kernels": set(),
    "emulation": {"engine", "runtime", "transfer"},
    "engine": {"kernels", "runtime"},
    "grammar": {"runtime"},
    "queue": {"runtime"},
    "transfer": {"kernels", "runtime"},
    "worker": {"emulation", "engine", "grammar", "queue", "transfer", "runtime"},
    "prefill": {"engine", "queue", "transfer", "runtime", "worker"},
    "decode": {"engine", "queue", "router", "transfer", "runtime", "worker"},
    "router": {"runtime"},
    "frontend": {"router", "runtime"},
    "sdk": {"models", "router", "runtime", "transfer"},
    "models": {"engine", "runtime"},
    "vllm": {"decode", "prefill", "queue", "runtime", "sdk", "transfer"},
}
ANYTHING = {"launch", "bench"}
ROOMS = sorted(MAY_IMPORT.keys() | ANYTHING)
WITHOUT_TORCH = ("runtime", "router", "frontend")
BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
BANNED_CALLS = {"eval", "exec", "os.system", "torch.load"}
BANNED_METHODS = {"get_serialized_descs", "deserialize_descs"}  # NIXL's, which pickle


def sources(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules a file imports, wherever in the file."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module or ""


def test_every_room_is_packaged_and_every_package_is_a_room() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts) for room in ROOMS for path in sources(room)
    }
    assert {f"tandem.{folder}" for folder in folders} == set(tool["packages"])
    assert tool["package-dir"] == {f"tandem.{room}": room for room in ROOMS}


@pytest.mark.parametrize("room", ["queue", "kernels", "vllm"])
def test_a_room_that_would_shadow_another_package_has_no_init(room: str) -> None:
    assert not (ROOT / room / "__init__.py").exists()


def test_there_is_no_tandem_folder_at_the_root() -> None:
    assert not (ROOT / "tandem").exists()


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    for path in sources(room):
        for name in imports(path):
            assert name != "tandem", (
                f"{path}: write `import tandem.x`, never `from tandem import x`"
            )
            if room in MAY_IMPORT and name.startswith("tandem."):
                other = name.split(".")[1]
                assert other == room or other in MAY_IMPORT[room], f"{path} imports {name}"


def test_light_rooms_load_no_torch() -> None:
    modules = [
        ".".join(("tandem", *path.relative_to(ROOT).with_suffix("").parts))
        for room in WITHOUT_TORCH
        for path in sources(room)
        if path.stem not in ("__init__", "__main__")
    ]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


@pytest.mark.parametrize("room", ROOMS)
def test_clocks_are_read_through_their_module_so_that_a_pace_slows_them(room: str) -> None:
    for path in sources(room):
        for node in ast.walk(parsed(path)):
            assert not (isinstance(node, ast.ImportFrom) and node.module == "time"), (
                f"{path}:{node.lineno}: write `import time`, whose names runtime/clock.py replaces"
            )


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_runs_what_it_was_sent(room: str) -> None:
    for path in sources(room):
        assert not {name.split(".")[0] for name in imports(path)} & BANNED_MODULES, path
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            where = f"{path}:{node.lineno}: {called}"
            assert called not in BANNED_CALLS, where
            assert called.rpartition(".")[2] not in BANNED_METHODS, where
            for keyword in node.keywords:
                is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                assert not (is_true and keyword.arg in ("shell", "trust_remote_code")), where
