"""The GPUs, cores and memory of this machine, found without importing torch."""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from tandem.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """A GPU that this process may use; `visible_id` is its name in CUDA_VISIBLE_DEVICES."""

    index: int
    name: str
    memory_bytes: int
    visible_id: str


@cache
def list_gpus() -> tuple[GpuInfo, ...]:
    """Return the GPUs that the CUDA driver shows; empty without a driver."""
    driver = _cuda_driver()
    count = ctypes.c_int(0)
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    visible = [v for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v.strip()]
    return tuple(
        _describe(driver, index, visible[index] if index < len(visible) else str(index))
        for index in range(count.value)
    )


def driver_version() -> str | None:
    """Return the CUDA version that the driver supports, such as 13.0; None without a driver."""
    driver = _cuda_driver()
    version = ctypes.c_int(0)
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def device_for(gpu: str) -> str:
    """Return the engine's device for `--gpu`: an index, several as in 0,1, `cpu` or `auto`.

    Raise ConfigError with the GPUs of this machine when it lacks that one.
    """
    if gpu in ("auto", "cpu"):
        return gpu
    indexes = gpu.split(",")
    if not all(index.isdecimal() for index in indexes):
        reason = f"--gpu {gpu}: must be an index, cpu or auto; of --tp several, as in 0,1"
        raise ConfigError(reason, param="gpu")
    for index in indexes:
        require_gpu(int(index), f"--gpu {gpu}", "--gpu cpu", list_gpus())
    return f"cuda:{','.join(str(int(index)) for index in indexes)}"


def require_gpu(index: int, asked_by: str, without: str, gpus: Sequence[GpuInfo]) -> GpuInfo:
    """Return the GPU of `gpus` with that index. Raise ConfigError naming all of `gpus`."""
    for gpu in gpus:
        if gpu.index == index:
            return gpu
    names = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in gpus)
    has = f"this machine has GPU {names}" if gpus else "this machine has no GPU"
    choice = f"choose one of these or {without}" if gpus else f"use {without}"
    raise ConfigError(f"{asked_by}: {has}; {choice}", param="gpu")


def num_usable_cores() -> int:
    """Return the cores that this process may use: its affinity, within the container's quota."""
    num_cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            num_cores = min(num_cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return num_cores


def usable_memory_bytes() -> int:
    """Return the memory that this process may use: the machine's, within the container's limit."""
    num_bytes = int(psutil.virtual_memory().total)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        return num_bytes if limit == "max" else min(num_bytes, int(limit))
    except (OSError, ValueError):
        return num_bytes


def _cuda_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _describe(driver: ctypes.CDLL, index: int, visible_id: str) -> GpuInfo:
    name = ctypes.create_string_buffer(128)
    memory = ctypes.c_size_t(0)
    device = ctypes.c_int(0)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    return GpuInfo(index, name.value.decode(errors="replace"), memory.value, visible_id)
