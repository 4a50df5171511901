"""The rooms, the arrows between them, and what no code of ours may do."""

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "runtime": set(),
    "kernels": set(),
    "config": {
        "decode",
        "engine",
        "frontend",
        "prefill",
        "queue",
        "router",
        "runtime",
        "transfer",
    },
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
MAY_IMPORT["bench"] = set(MAY_IMPORT)
MAY_IMPORT["launch"] = set(MAY_IMPORT)
ROOMS = sorted(MAY_IMPORT)
MAX_FILES = 15  # of a folder, beside its __init__.py
WITHOUT_TORCH = ("runtime", "router", "frontend")
BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
BANNED_CALLS = {"eval", "exec", "os.system", "torch.load"}
BANNED_METHODS = {"get_serialized_descs", "deserialize_descs"}  # NIXL's, which pickle


def sources(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


Node = ast.Import | ast.ImportFrom | ast.Call


@cache
def nodes(path: Path) -> list[Node]:
    """Imports and calls, wherever in the file."""
    tree = ast.parse(path.read_text(), str(path))
    return [each for each in ast.walk(tree) if isinstance(each, Node)]


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules a file imports, wherever in the file."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module or ""


def modules(path: Path) -> Iterator[str]:
    """Full names of the modules of ours that a file imports, also for types alone."""
    for node in nodes(path):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if module_path(name).exists() else node.module or "" for name in below]
        yield from (name for name in names if name.startswith("tandem.") and name.count(".") > 1)


def module_path(name: str) -> Path:
    """Return the file of a module, or the __init__.py of a package."""
    path = ROOT.joinpath(*name.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def package_of(path: Path) -> str:
    return ".".join(("tandem", *path.parent.relative_to(ROOT).parts))


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
def test_a_folder_of_a_room_has_few_files(room: str) -> None:
    num_files = Counter(path.parent for path in sources(room) if path.stem != "__init__")
    assert {folder: num for folder, num in num_files.items() if num > MAX_FILES} == {}


@pytest.mark.parametrize("room", ROOMS)
def test_the_folders_of_a_room_form_no_circle_of_imports(room: str) -> None:
    # the room's own __init__.py, which may offer names of all its folders, is part of none
    arrows: dict[str, dict[str, str]] = {}
    for path in sources(room):
        folder = package_of(path)
        if path.name == "__init__.py" and folder == f"tandem.{room}":
            continue
        for module in modules(path):
            other = package_of(module_path(module))
            if other.split(".")[1] == room and other != folder:
                arrows.setdefault(folder, {})[other] = f"{path.relative_to(ROOT)}: {module}"
    while ends := [folder for folder, others in arrows.items() if not others.keys() & arrows]:
        for folder in ends:
            del arrows[folder]
    left = {f: {o: why for o, why in others.items() if o in arrows} for f, others in arrows.items()}
    assert left == {}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    for path in sources(room):
        for name in imports(path):
            assert name != "tandem", (
                f"{path}: write `import tandem.x`, never `from tandem import x`"
            )
            if name.startswith("tandem."):
                other = name.split(".")[1]
                assert other == room or other in MAY_IMPORT[room], f"{path} imports {name}"


def test_light_rooms_and_emulated_workers_load_no_torch() -> None:
    modules = ["tandem.launch.run.roles"]  # it has to prepare what torch reads
    modules += [f"tandem.{room}.worker" for room in ("worker", "decode", "prefill")]
    modules += [
        ".".join(("tandem", *path.relative_to(ROOT).with_suffix("").parts))
        for room in WITHOUT_TORCH
        for path in sources(room)
        if path.stem not in ("__init__", "__main__")
    ]
    code = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, timeout=100, check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("room", ROOMS)
def test_clocks_are_read_through_their_module_so_that_a_pace_slows_them(room: str) -> None:
    for path in sources(room):
        for node in nodes(path):
            assert not (isinstance(node, ast.ImportFrom) and node.module == "time"), (
                f"{path}:{node.lineno}: write `import time`, whose names runtime/clock.py replaces"
            )


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_runs_what_it_was_sent(room: str) -> None:
    for path in sources(room):
        assert not {name.split(".")[0] for name in imports(path)} & BANNED_MODULES, path
        for node in nodes(path):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            where = f"{path}:{node.lineno}: {called}"
            assert called not in BANNED_CALLS, where
            assert called.rpartition(".")[2] not in BANNED_METHODS, where
            for keyword in node.keywords:
                is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                assert not (is_true and keyword.arg in ("shell", "trust_remote_code")), where
