"""The device of a run and the amount that is measured on it."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

ROTATED_BYTES = 256 << 20  # that calls in a row touch before data comes again: four L2 of an H200
MAX_INPUT_SETS = 64


@dataclass(frozen=True, slots=True)
class Setting:
    """A device, and how much to measure: a dry run shows that everything runs, and no more."""

    device: torch.device
    rounds: int
    num_warmups: int  # rounds before those
    sample_s: float  # that the calls of one sample take together, about
    dtype: torch.dtype

    @property
    def is_dry(self) -> bool:
        return self.device.type != "cuda"

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.is_dry else full

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def num_sets(self, bytes_of_one: float) -> int:
        """Return how many input sets timed calls go through in turns, so that no cache serves."""
        if self.is_dry or not self.rounds:
            return 1
        return max(2, min(MAX_INPUT_SETS, math.ceil(ROTATED_BYTES / bytes_of_one)))

    def once(self, rounds: int) -> "Setting":
        """Return the setting for a quick look."""
        return replace(self, rounds=rounds, num_warmups=0)


def setting_for(device: str) -> Setting:
    """Return seven rounds of some milliseconds on a GPU, one of single calls elsewhere.

    On a CPU numbers are float32: the interpreter's products in bfloat16 are wrong.
    """
    if is_cpu(device):
        return Setting(torch.device(device), 1, 0, 6e-3, torch.float32)
    return Setting(torch.device(device), 7, 1, 6e-3, torch.bfloat16)


def synchronize(setting: Setting) -> None:
    if not setting.is_dry:
        torch.cuda.synchronize(setting.device)


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes by the host's clock."""
    started_at = time.perf_counter()
    call()
    return time.perf_counter() - started_at


def is_cpu(device: str) -> bool:
    return torch.device(device).type == "cpu"


def gpu_name(device: str) -> str | None:
    return None if is_cpu(device) else torch.cuda.get_device_name(torch.device(device))


def gpu_id(device: str) -> str:
    """Return nvidia-smi's name of the device; "none" for a CPU."""
    if is_cpu(device):
        return "none"
    return f"GPU-{torch.cuda.get_device_properties(torch.device(device)).uuid}"


def chip(device: str) -> dict[str, str | int]:
    """Return the GPU's own numbers; empty for a CPU."""
    if is_cpu(device):
        return {}
    properties = torch.cuda.get_device_properties(torch.device(device))
    return {
        "capability": f"{properties.major}.{properties.minor}",
        "num_multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
    }
