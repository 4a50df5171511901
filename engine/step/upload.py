"""Small things on their way between host and device, without the host waiting for them."""

from array import array
from collections.abc import Sequence

import torch

VALUE_BYTES = 8


def on_host(
    sections: "Sequence[array[int] | array[float] | bytes]", device: torch.device
) -> torch.Tensor:
    """The 8-byte values of `sections` one after another, int64, ready to be copied to `device`."""
    joined = bytearray().join(sections)
    if not joined:
        return torch.empty(0, dtype=torch.int64)
    flat = torch.frombuffer(joined, dtype=torch.int64)
    # Pinned memory comes from torch's pool, which takes it back once its copies have been made.
    return flat.pin_memory() if device.type == "cuda" else flat


def upload(
    sections: "Sequence[array[int] | array[float]]", device: torch.device
) -> list[torch.Tensor]:
    """One int64 tensor per section, by one copy; a section of floats has their float64 bits."""
    lengths = [len(section) for section in sections]
    if device.type != "cuda":
        return list(on_host(sections, device).split_with_sizes(lengths))
    even = in_pairs(sections)
    flat = on_host(even, device).to(device, non_blocking=True)
    parts = flat.split_with_sizes([len(section) // VALUE_BYTES for section in even])
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]


def in_pairs(sections: "Sequence[array[int] | array[float]]") -> list[bytes]:
    """Sections of an even number of values, so that each starts at a multiple of 16 bytes.

    Triton builds a kernel anew for a pointer that doesn't, in the middle of a step.
    """
    return [section.tobytes() + bytes(len(section) % 2 * VALUE_BYTES) for section in sections]


def download(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, which is there once what comes next on this stream has happened."""
    if tensor.device.type != "cuda":
        return tensor.clone()  # a replayed step writes where the last one did
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
