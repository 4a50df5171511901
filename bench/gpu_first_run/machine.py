"""The machine: doctor's findings about it, and what else Triton and CUDA need."""

import shutil
import subprocess
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tandem.bench.report.figures import Figure, at_least
from tandem.bench.report.setting import Setting
from tandem.launch.doctor.checks_machine import check_machine
from tandem.launch.doctor.checks_parts import check_packages
from tandem.transfer.cuda_context import has_cuda_context


def run(setting: Setting) -> Iterator[Figure]:
    """Yield 1 for everything that is as it should be."""
    for found in (*check_machine(), *check_packages()):
        yield _fact(found.subject, found.subject, found.grade == "ok", found.detail, found.remedy)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    is_there = header.exists() and (shutil.which("gcc") or shutil.which("cc")) is not None
    yield _fact("compiler", "gcc and Python.h, for Triton's launchers", is_there, str(header))
    if setting.is_dry:
        return
    libraries = _output("ldconfig", "-p")
    is_known = all(name in libraries for name in ("libcuda.so.1", "libnvidia-ml.so.1"))
    yield _fact("driver_libraries", "driver's libraries known to ldconfig", is_known)
    links = _output("nvidia-smi", "nvlink", "-s")
    yield _fact("nvlink", "nvidia-smi nvlink -s", True, *links.splitlines())
    unbound = _on_a_thread(has_cuda_context)
    yield _fact("context_of_new_thread", "a new thread has a CUDA context", True, str(unbound))

    def has_context_of_device() -> bool:
        torch.cuda.set_device(setting.device)
        return has_cuda_context()

    bound = _on_a_thread(has_context_of_device)
    yield _fact("context_after_set_device", "it has one after set_device", bound)


def _fact(name: str, label: str, holds: bool, *notes: str) -> Figure:
    noted = tuple(filter(None, notes))
    return Figure(name, label, "", (float(holds),), at_least(1.0), notes=noted)


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
