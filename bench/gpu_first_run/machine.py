"""The machine: what the program finds of a GPU, its libraries and its limits."""

import importlib.util
import platform
import shutil
import subprocess
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from tandem.bench.report.figures import Figure, at_least
from tandem.bench.report.setting import Setting
from tandem.transfer.cuda_context import has_cuda_context

PACKAGES = ("triton", "cupy", "nixl_cu13", "xxhash", "uvloop", "nats")


def run(setting: Setting) -> Iterator[Figure]:
    """Yield 1 for everything that is there."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    yield _fact(
        "compiler", "gcc and Python.h, for Triton's launchers", _has_compiler(), str(header)
    )
    found = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]
    missing = sorted({*PACKAGES} - {*found})
    yield _fact("packages", "packages", not missing, f"missing: {', '.join(missing) or 'none'}")
    yield _fact("limits", "limits of the machine", True, *_limits())
    if setting.is_dry:
        return
    libraries = _output("ldconfig", "-p")
    names = ("libcuda.so.1", "libnvidia-ml.so.1")
    known = [name for name in names if name in libraries]
    yield _fact("driver_libraries", "driver's libraries known to ldconfig", known == [*names])
    yield _fact(
        "nvlink", "nvidia-smi nvlink -s", True, *_output("nvidia-smi", "nvlink", "-s").splitlines()
    )
    unbound = _on_a_thread(has_cuda_context)
    bound = _on_a_thread(lambda: _has_context_of(setting.device))
    yield _fact("context_of_new_thread", "a new thread has a CUDA context", True, str(unbound))
    yield _fact("context_after_set_device", "it has one after set_device", bound)


def _fact(name: str, label: str, holds: bool, *notes: str) -> Figure:
    return Figure(name, label, "", (float(holds),), at_least(1.0), notes=notes)


def _has_compiler() -> bool:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return header.exists() and (shutil.which("gcc") or shutil.which("cc")) is not None


def _limits() -> Sequence[str]:
    yama = Path("/proc/sys/kernel/yama/ptrace_scope")
    scope = yama.read_text().strip() if yama.exists() else "absent"
    shared = shutil.disk_usage("/dev/shm").free >> 20
    release = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    return (
        f"ptrace_scope {scope}",
        f"/dev/shm {shared} MiB free",
        release,
        f"torch {torch.__version__}",
    )


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return (done.stdout + done.stderr).strip()


def _on_a_thread(look: Callable[[], bool]) -> bool:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(look()))
    thread.start()
    thread.join()
    return bool(found and found[0])


def _has_context_of(device: torch.device) -> bool:
    torch.cuda.set_device(device)
    return has_cuda_context()
