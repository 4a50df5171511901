"""Which build of a kernel a chip gets: a committed table, chosen offline by measuring."""

import json
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton
from triton.runtime import driver

Config = TypeVar("Config")

TABLE = Path(__file__).with_name("tuned.json")
INTERPRETED = 0  # the architecture of a machine without a GPU

# Multiprocessors of an A100, an H100 or H200, and a B200: for a chip that is not here.
_MULTIPROCESSORS = {INTERPRETED: 2, 80: 108, 90: 132, 100: 148}


def architecture() -> int:
    """The chip that kernels are built for, as in sm_90; INTERPRETED where they run in Python."""
    if triton.knobs.runtime.interpret:
        return INTERPRETED
    arch: int = driver.active.get_current_target().arch
    return arch


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of `device`, or those of the architecture's usual chip."""
    if device.type == "cuda":
        return _count_multiprocessors(device.index or 0)
    return _MULTIPROCESSORS[_nearest(architecture(), tuple(sorted(_MULTIPROCESSORS)))]


def tuned_config(default: Config, kernel: str, **shape: int) -> Config:
    """What the table says of `kernel` at `shape` on this chip, over the fields of `default`.

    A chip that the table doesn't know gets the entry of the newest one it knows below it; a shape
    that it doesn't know gets `default`.
    """
    entry = table_entry(architecture(), kernel, **shape)
    return default if entry is None else type(default)(**entry)


def table_entry(arch: int, kernel: str, **shape: int) -> dict[str, Any] | None:
    """The table's line for `kernel` at `shape` on `arch`, if it has one."""
    table = _table()
    known = tuple(sorted(int(name.removeprefix("sm_")) for name in table))
    if not known or arch < known[0]:
        return None
    entry: dict[str, Any] | None = (
        table[f"sm_{_nearest(arch, known)}"].get(kernel, {}).get(shape_key(**shape))
    )
    return entry


def shape_key(**shape: int) -> str:
    """How the table writes a shape: "head_dim=128 element_bytes=2"."""
    return " ".join(f"{name}={value}" for name, value in shape.items())


def config_fields(config: Any) -> dict[str, Any]:
    """A configuration as the table holds it."""
    return {field.name: getattr(config, field.name) for field in fields(config)}


def _nearest(arch: int, known: tuple[int, ...]) -> int:
    return max(one for one in known if one <= arch)


@cache
def _table() -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    table: dict[str, dict[str, dict[str, dict[str, Any]]]] = json.loads(TABLE.read_text())
    return table


@cache
def _count_multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
