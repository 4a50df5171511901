"""The build of a kernel for a chip: a committed table, filled by measuring offline.

The table is to be measured on the first GPU: `python -m tandem.bench.kernels.tune` does.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton
from triton.runtime import driver

Config = TypeVar("Config")

TABLE = Path(__file__).with_name("tuned.json")
TABLE_VARIABLE = "TANDEM_KERNEL_TABLE"  # another table's path, of a tuning that is not finished
INTERPRETED = 0  # the architecture of a machine without a GPU
WARP = 32  # threads
VECTOR_BYTES = 16  # the widest load of one thread

# As of the kernels, which triton.jit makes for the interpreter or for a chip when they are defined.
_IS_INTERPRETED = triton.knobs.runtime.interpret

# Multiprocessors of an A100, an H100 or H200, and a B200: for a chip that is not here.
_MULTIPROCESSORS = {INTERPRETED: 2, 80: 108, 90: 132, 100: 148}


def architecture() -> int:
    """Return the chip that kernels are built for, 90 for sm_90; INTERPRETED without a GPU."""
    if _IS_INTERPRETED:
        return INTERPRETED
    return _architecture_of(driver.active)


def num_multiprocessors(device: torch.device) -> int:
    """Count the multiprocessors of `device`, or those of the architecture's usual chip."""
    if device.type == "cuda":
        return _count_multiprocessors(device.index or 0)
    return _usual_multiprocessors(architecture())


def tuned_config(default: Config, kernel: str, **shape: int) -> Config:
    """Return the table's configuration for `kernel` at `shape` on this chip, else `default`.

    A chip that is not in the table gets the entry of the newest one below it.
    """
    config: Config = _chosen(architecture(), default, kernel, tuple(shape.items()))
    return config


def table_entry(arch: int, kernel: str, **shape: int) -> dict[str, Any] | None:
    """Return the table's entry for `kernel` at `shape` on `arch`, if it has one."""
    table = _table()
    known = tuple(sorted(int(name.removeprefix("sm_")) for name in table))
    if not known or arch < known[0]:
        return None
    entry: dict[str, Any] | None = (
        table[f"sm_{_nearest(arch, known)}"].get(kernel, {}).get(shape_key(**shape))
    )
    return entry


def shape_key(**shape: int) -> str:
    """Return a shape as the table writes it: "head_dim=128 element_bytes=2"."""
    return " ".join(f"{name}={value}" for name, value in shape.items())


@cache
def _architecture_of(chips: Any) -> int:
    # A worker's GPUs are alike. Asking for one takes longer than the rest of a launch.
    arch: int = chips.get_current_target().arch
    return arch


@cache
def _chosen(arch: int, default: Config, kernel: str, shape: tuple[tuple[str, int], ...]) -> Config:
    entry = table_entry(arch, kernel, **dict(shape))
    return default if entry is None else type(default)(**entry)


def _nearest(arch: int, known: tuple[int, ...]) -> int:
    return max(one for one in known if one <= arch)


@cache
def _table() -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    path = Path(os.environ.get(TABLE_VARIABLE) or TABLE)
    table: dict[str, dict[str, dict[str, dict[str, Any]]]] = json.loads(path.read_text())
    return table


@cache
def _usual_multiprocessors(arch: int) -> int:
    return _MULTIPROCESSORS[_nearest(arch, tuple(sorted(_MULTIPROCESSORS)))]


@cache
def _count_multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
