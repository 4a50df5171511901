"""The compiler's output: registers, spills and memory of kernels, for this chip or another."""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.knobs import nvidia as tools
from triton.runtime import driver

from tandem.kernels.building import running_kernels_by

MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # per block, CUDA guide 16.2
SHARED_BYTES_PER_SM = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
REGISTERS_PER_SM = 65536
MAX_WARPS_PER_SM = 64
RESERVED_SHARED_BYTES = 1024  # per block, by the driver
_INSTRUCTIONS = {
    "wgmma": "wgmma.mma_async",
    "mma": "mma.sync",
    "tma": "cp.async.bulk.tensor",
    "cp.async": "cp.async.cg.shared",
    "16-byte loads": "ld.global.v4",
}


Lookup = tuple[str, dict[str, Any], Any]  # kernel's name, shape, configuration


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One build of one kernel; `registers` is per thread, `spill_bytes` its local memory."""

    name: str
    arch: int
    num_warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    is_dependent: bool  # may begin while the previous kernel ends
    ptx: str
    cubin: bytes

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that fit one multiprocessor by registers, shared memory and warps."""
        by_registers = REGISTERS_PER_SM // _block_registers(self.registers, self.num_warps)
        shared = self.shared_bytes + RESERVED_SHARED_BYTES
        by_shared = SHARED_BYTES_PER_SM[self.arch] // shared
        return min(by_registers, by_shared, MAX_WARPS_PER_SM // self.num_warps, 32)

    def sass(self) -> str:
        """Return the machine code, as text."""
        return _cuobjdump("--dump-sass", self.cubin)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel that was launched on this chip."""

    text: str  # its build and its programs, as a line for people
    spilled_words: int  # per thread


class AbsentChip:
    """A driver of a GPU that is not there; Triton needs from it the chip to compile for."""

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
    """Compile the launches of the body for `arch` (80, 90, 100) and run nothing; yield their list.

    Launch with tensors of torch's meta device: shapes, strides and dtypes, no memory. Not for a
    process that interprets kernels.
    """
    compiled: list[CompiledKernel] = []

    def compile_only(run: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        build = run(*args, grid=grid, warmup=True, **kwargs)
        compiled.append(_read(build, arch))
        return build

    driver.set_active(AbsentChip(arch))
    try:
        with running_kernels_by(compile_only):
            yield compiled
    finally:
        driver._active = None


@contextlib.contextmanager
def recording_launches(launches: list[Launch]) -> Iterator[None]:
    """Add the launches of the body to `launches`; none under the interpreter."""

    def recorded(run: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        build = run(*args, grid=grid, warmup=warmup, **kwargs)
        with contextlib.suppress(Exception):  # another Triton's, or a cache without PTX
            launches.append(_read_launch(build, grid, kwargs))
        return build

    with running_kernels_by(recorded):
        yield


@contextlib.contextmanager
def recording_lookups(family: ModuleType) -> Iterator[list[Lookup]]:
    """Yield a list to which the body's look-ups of `family` in the table of tuning are added."""
    found: list[Lookup] = []
    look_up = getattr(family, "tuned_config", None)
    if look_up is None:  # a family without candidates
        yield found
        return

    def recorded(default: Any, kernel: str, **shape: Any) -> Any:
        config = look_up(default, kernel, **shape)
        found.append((kernel, shape, config))
        return config

    family.tuned_config = recorded  # type: ignore[attr-defined]
    try:
        yield found
    finally:
        family.tuned_config = look_up  # type: ignore[attr-defined]


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without memory."""
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
        is_dependent=build.metadata.launch_pdl,
        ptx=build.asm["ptx"],
        cubin=build.asm["cubin"],
    )


def _read_launch(build: Any, grid: Any, arguments: Mapping[str, Any]) -> Launch:
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    meta = build.metadata
    blocks_per_sm = min(
        REGISTERS_PER_SM // _block_registers(build.n_regs, meta.num_warps),
        gpu.shared_memory_per_multiprocessor // (meta.shared + RESERVED_SHARED_BYTES),
        gpu.max_threads_per_multi_processor // (32 * meta.num_warps),
    )
    programs = "x".join(map(str, grid)) if isinstance(grid, tuple | list) else ""
    instructions = [name for name, text in _INSTRUCTIONS.items() if text in build.asm["ptx"]]
    # By the kernels' convention their options are in capitals.
    constants = [f"{name}={value}" for name, value in arguments.items() if name.isupper()]
    text = (
        f"{meta.name}: {programs} programs, {meta.num_warps} warps x {meta.num_stages} stages, "
        f"{build.n_regs} registers, {build.n_spills} spilled, {meta.shared / 1024:.0f} KiB shared, "
        f"{blocks_per_sm} per SM; {', '.join(instructions)}; {' '.join(constants)}"
    )
    return Launch(text, build.n_spills)


def _block_registers(registers: int, num_warps: int) -> int:
    # Registers go to warps in units of 256: CUDA's occupancy calculator.
    return -(-registers * 32 // 256) * 256 * num_warps


def _cuobjdump(option: str, cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run(
            [tools.cuobjdump.path, option, str(path)], capture_output=True, text=True, check=True
        )
    return done.stdout
