"""The JSON document of a run: its command, commit, machine, settings and figures.

Needs msgspec alone: a GPU machine has little else.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from tandem.bench.report.figures import Figure
from tandem.runtime.errors import ConfigError

SCHEMA_VERSION = 2
_LIBRARIES = ("tandem-serve", "torch", "triton", "nixl-cu13", "nixl-cu12", "cupy-cuda13x", "numpy")
_ENVIRONMENT = ("UCX_", "NIXL_", "PYTORCH_", "OMP_NUM")  # beginnings of variables' names


def document(
    *,
    command: Sequence[str],
    settings: Mapping[str, Any],
    started_at: datetime,
    how: Mapping[str, str],
    figures: Iterable[Figure] = (),
    commit: str = "",
    **more: Any,
) -> dict[str, Any]:
    """Return a run as plain values; `how` defines the figures, `more` is the program's own."""
    return {
        "schema_version": SCHEMA_VERSION,
        "started_at": started_at.isoformat(timespec="seconds"),
        "ended_at": utc_now().isoformat(timespec="seconds"),
        "command": list(command),
        "commit": commit or this_commit(),
        "machine": machine(),
        "settings": msgspec.to_builtins(settings, enc_hook=str, str_keys=True),
        "how": dict(how),
        "figures": {figure.name: figure.to_json() for figure in figures},
        **more,
    }


def write_document(path: Path, whole: Mapping[str, Any]) -> None:
    """Write a document as JSON, as `write_whole` does."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all; folders are made. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    part.replace(path)


def with_part(page: str, begin: str, end: str, part: str) -> str:
    """Return a page with `part` between its marks. Raises ConfigError unless each is there once."""
    before, *after = page.split(begin)
    rest = "".join(after).split(end)
    if len(after) != 1 or len(rest) != 2:
        raise ConfigError(f"the page must have {begin!r} and after it {end!r}, once each")
    return f"{before}{begin}\n\n{part}\n{end}{rest[1]}"


def utc_now() -> datetime:
    return datetime.now(UTC)


def this_commit() -> str:
    """Return the commit of the running code, "+" if it was changed since; "unknown" without git."""

    def git(*arguments: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def machine() -> dict[str, Any]:
    """Return the machine and the software that figures are measured on.

    A GPU is named where the program has loaded torch.
    """
    torch = sys.modules.get("torch")
    has_gpu = torch is not None and torch.cuda.is_available()
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "num_usable_cpus": len(os.sched_getaffinity(0)) if sys.platform == "linux" else None,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg(),
        "gpu": torch.cuda.get_device_name(0) if torch is not None and has_gpu else None,
        "libraries": {name: found for name in _LIBRARIES if (found := _version(name))},
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_ENVIRONMENT)
        },
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            names = (line.partition(":")[2] for line in info if line.startswith("model name"))
            return next(names, platform.processor()).strip()
    except OSError:
        return platform.processor()
