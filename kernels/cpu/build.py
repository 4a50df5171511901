"""The kernels for a CPU, compiled for the present processor when they are first needed."""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

from tandem.kernels.alone import alone_on_this_machine

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
# Another processor's name for the compiler, as x86-64-v3: tests compute on less than is there.
PROCESSOR_VARIABLE = "TANDEM_CPU_KERNELS_MARCH"
BUILD_TIMEOUT_S = 120


class BuildError(Exception):
    """The kernels could not be compiled or loaded here."""


@cache
def load_library() -> ctypes.CDLL:
    """Load the compiled kernels. Raises BuildError, at every call, where they cannot be built.

    The library is kept in the user's cache folder, named after source, compiler and processor.
    """
    compiler = shlex.split(os.environ.get("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        raise BuildError(f"there is no C compiler {compiler[0]!r}; set CC to another")
    try:
        built = _cache_folder() / f"cpu-kernels-{_fingerprint(compiler)}.so"
        if not _is_usable(built):
            with alone_on_this_machine(built.parent):
                if not _is_usable(built):
                    _compile(compiler, built)
        return ctypes.CDLL(str(built))
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{shlex.join(error.cmd)} failed: {error.stderr.strip()}") from error
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        raise BuildError(str(error)) from error


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "tandem"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(folder):
        raise BuildError(
            f"{folder} belongs to another user or can be written to by one; chmod go-w, or set "
            "XDG_CACHE_HOME to another folder"
        )
    return folder


def _is_usable(built: Path) -> bool:
    return built.exists() and _is_private(built)


def _is_private(path: Path) -> bool:
    """Return True for a path of this user that no other can write to: its code may be run."""
    found = path.stat()
    is_writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid == os.geteuid() and not is_writable


def _fingerprint(compiler: list[str]) -> str:
    version = _run([*compiler, "--version"])
    sources = [path.read_text() for path in sorted(FOLDER.glob("*.[ch]"))]
    parts = [*sources, *compiler, version, *_flags(), str(_openmp()), _processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _flags() -> tuple[str, ...]:
    return *FLAGS, f"-march={os.environ.get(PROCESSOR_VARIABLE) or 'native'}"


def _processor() -> str:
    """Return the processor's name and features, on which the machine code depends."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.platform()
    lines = cpuinfo.read_text().partition("\n\n")[0].splitlines()
    kept = ("vendor_id", "cpu family", "model\t", "flags", "Features", "CPU ")
    return platform.machine() + "".join(line for line in lines if line.startswith(kept))


def _openmp() -> Path | None:
    """Return PyTorch's own OpenMP library: a second one would keep threads of its own."""
    return next(Path(torch.__file__).parent.glob("lib/libgomp*.so*"), None)


def _compile(compiler: list[str], built: Path) -> None:
    """Compile on all cores; write atomically, so that nobody ever sees a partial file."""
    openmp = _openmp()
    libraries = [] if openmp is None else [str(openmp)]
    command = [*compiler, *_flags()]
    with (
        tempfile.TemporaryDirectory(dir=built.parent) as folder,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as cores,
    ):

        def compiled(source: Path) -> str:
            target = str(Path(folder) / f"{source.stem}.o")
            _run([*command, "-c", str(source), "-o", target])
            return target

        parts = list(cores.map(compiled, sorted(FOLDER.glob("*.c"))))
        target = Path(folder) / built.name
        _run([*command, *parts, *libraries, "-lm", "-o", str(target)])
        target.chmod(0o700)
        target.replace(built)
    logger.info("compiled the CPU kernels: %s", built)


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=BUILD_TIMEOUT_S
    )
    return done.stdout
