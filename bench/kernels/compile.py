"""What the compiler makes of a kernel for a chip that is not here: registers, spills, memory."""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.knobs import nvidia as tools
from triton.runtime import driver
from triton.runtime.jit import JITFunction

MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # per block, CUDA guide 16.2
SHARED_BYTES_PER_SM = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
REGISTERS_PER_SM = 65536
MAX_WARPS_PER_SM = 64
RESERVED_SHARED_BYTES = 1024  # per block, by the driver


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One build of one kernel; `registers` is per thread, `spill_bytes` its local memory."""

    name: str
    arch: int
    num_warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    ptx: str
    cubin: bytes

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that fit one multiprocessor by registers, shared memory and warps."""
        # Registers go to warps in units of 256: CUDA's occupancy calculator.
        by_registers = REGISTERS_PER_SM // (-(-self.registers * 32 // 256) * 256 * self.num_warps)
        shared = self.shared_bytes + RESERVED_SHARED_BYTES
        by_shared = SHARED_BYTES_PER_SM[self.arch] // shared
        return min(by_registers, by_shared, MAX_WARPS_PER_SM // self.num_warps, 32)

    def sass(self) -> str:
        """The machine code, as text."""
        return _cuobjdump("--dump-sass", self.cubin)


class _Chip:
    """A driver of a GPU that is not there: Triton asks it only what to compile for."""

    def __init__(self, arch: int) -> None:
        self._arch = arch
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._arch

    def get_current_stream(self, _device: int) -> int:
        return 0


@contextlib.contextmanager
def compiling(arch: int) -> Iterator[list[CompiledKernel]]:
    """Launches inside compile for `arch` (80, 90, 100) and run nothing; they gather in the list.

    Launch with tensors of torch's meta device: shapes, strides and dtypes, no memory. Not for a
    process that interprets kernels.
    """
    compiled: list[CompiledKernel] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        build = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(_read(build, arch))
        return build

    driver.set_active(_Chip(arch))
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = run
        driver._active = None


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor with everything but memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _read(build: Any, arch: int) -> CompiledKernel:
    usage = _cuobjdump("--dump-resource-usage", build.asm["cubin"])
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, _, local = map(int, found.groups())
    return CompiledKernel(
        name=build.metadata.name,
        arch=arch,
        num_warps=build.metadata.num_warps,
        registers=registers,
        spill_bytes=max(stack, local),
        shared_bytes=build.metadata.shared,
        ptx=build.asm["ptx"],
        cubin=build.asm["cubin"],
    )


def _cuobjdump(option: str, cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run(
            [tools.cuobjdump.path, option, str(path)], capture_output=True, text=True, check=True
        )
    return done.stdout
