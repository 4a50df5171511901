"""Small copies between host and device, for which the host does not wait."""

from array import array
from collections.abc import Sequence
from itertools import chain

import torch

VALUE_BYTES = 8


def on_host(
    sections: "Sequence[array[int] | array[float] | bytes]", device: torch.device
) -> torch.Tensor:
    """Join the 8-byte values of `sections` into one int64 tensor, pinned for a CUDA `device`."""
    joined = bytearray().join(sections)
    if not joined:
        return torch.empty(0, dtype=torch.int64)
    flat = torch.frombuffer(joined, dtype=torch.int64)
    # Pinned memory comes from torch's pool, which reuses it once its copies are done.
    return flat.pin_memory() if device.type == "cuda" else flat


def upload(
    sections: "Sequence[array[int] | array[float]]", device: torch.device
) -> list[torch.Tensor]:
    """Copy sections to `device` at once, as int64 tensors; one of floats holds float64 bits."""
    flat = on_host(in_pairs(sections), device).to(device, non_blocking=True)
    sizes = chain.from_iterable((len(section), len(section) % 2) for section in sections)
    return list(flat.split_with_sizes(list(sizes))[::2])  # without the padding


def in_pairs(sections: "Sequence[array[int] | array[float]]") -> list[bytes]:
    """Pad sections to even numbers of values, so that each starts at a multiple of 16 bytes.

    For an unaligned pointer Triton would build the kernel again, within a step.
    """
    return [section.tobytes() + bytes(len(section) % 2 * VALUE_BYTES) for section in sections]


def download(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to the host; the result is valid once later work on this stream has happened."""
    if tensor.device.type != "cuda":
        return tensor.clone()  # the next replayed step overwrites `tensor`
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
