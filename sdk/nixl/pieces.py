"""Checks and conversions of the pieces of memory, and of the indices, that callers pass."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from tandem.runtime.errors import InvalidRequestError
from tandem.sdk.nixl.descriptors import Pieces
from tandem.sdk.nixl.memory import as_memory
from tandem.transfer.transport import Indices, Memory

if TYPE_CHECKING:
    import torch

KvCache: TypeAlias = "torch.Tensor | NDArray[Any]"
# Tensors, or tuples of (address, bytes, device id); a fourth item is ignored.
Regions: TypeAlias = "torch.Tensor | Sequence[torch.Tensor] | Sequence[tuple[Any, ...]]"

_MAX_END = 1 << 63


def pieces_of(descs: "Regions | NDArray[np.uint64]", mem_type: str | None) -> Pieces:
    """Return the pieces. `mem_type` may be None for tensors only."""
    items = [descs] if hasattr(descs, "data_ptr") else list(descs)
    if not items:
        raise InvalidRequestError("descs: must not be empty", param="descs")
    if not hasattr(items[0], "data_ptr"):
        rows = [_row(index, item) for index, item in enumerate(items)]
        return Pieces(as_memory(mem_type), np.array(rows, dtype=np.uint64))
    tensors = cast("list[KvCache]", items)
    rows = [tensor_row(index, tensor) for index, tensor in enumerate(tensors)]
    memory = tensor_memory(tensors)
    if mem_type is not None and as_memory(mem_type) != memory:
        raise InvalidRequestError(
            f"mem_type: {mem_type!r} was given, but the tensors are in {memory!r}", param="mem_type"
        )
    return Pieces(memory, np.array(rows, dtype=np.uint64))


def caches_of(given: "KvCache | Sequence[KvCache]") -> "list[KvCache]":
    """Return one or several caches as a list."""
    if isinstance(given, np.ndarray) or hasattr(given, "data_ptr"):
        return [cast("KvCache", given)]
    return list(given)


def tensor_memory(tensors: "Sequence[KvCache]") -> Memory:
    """Return the kind of memory of the tensors. Raise unless it is the same for all."""
    devices = {"cpu" if isinstance(each, np.ndarray) else str(each.device) for each in tensors}
    if len(devices) > 1:
        raise InvalidRequestError(
            f"descs: tensors on {', '.join(sorted(devices))}, not on one device", param="descs"
        )
    kind = devices.pop().partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise InvalidRequestError(f"descs: tensors on {kind!r} can't be moved", param="descs")
    return "DRAM" if kind == "cpu" else "VRAM"


def tensor_row(index: int, tensor: "KvCache") -> tuple[int, int, int]:
    """Return (address, bytes, device id) of a whole tensor."""
    if isinstance(tensor, np.ndarray):
        is_contiguous, address, device = tensor.flags.c_contiguous, tensor.ctypes.data, 0
    else:
        is_contiguous, address = tensor.is_contiguous(), tensor.data_ptr()
        device = max(tensor.get_device(), 0)
    if not is_contiguous:
        raise InvalidRequestError(f"descs: tensor {index} is not contiguous", param="descs")
    if not tensor.nbytes:
        raise InvalidRequestError(f"descs: tensor {index} is empty", param="descs")
    return address, tensor.nbytes, device


def picked(name: str, indices: Indices, num_pieces: int) -> NDArray[np.int32]:
    """Return the indices for the library. Raise InvalidRequestError naming one out of range."""
    chosen = np.asarray(indices)
    if chosen.ndim != 1 or not len(chosen) or chosen.dtype.kind not in "iu":
        raise InvalidRequestError(f"{name}: one or more whole numbers are needed", param=name)
    wrong = chosen[(chosen < 0) | (chosen >= num_pieces)]
    if len(wrong):
        raise InvalidRequestError(
            f"{name}: {wrong[0]} is not among 0 to {num_pieces - 1}", param=name
        )
    return chosen.astype(np.int32)


def check_pairs(local: NDArray[np.uint64], remote: NDArray[np.uint64]) -> None:
    """Raise InvalidRequestError unless both sides have pieces of the same bytes."""
    if len(local) != len(remote):
        raise InvalidRequestError(
            f"remote_indices: {len(remote)} pieces for {len(local)} of this side",
            param="remote_indices",
        )
    differs = np.flatnonzero(local != remote)
    if len(differs):
        at = differs[0]
        raise InvalidRequestError(
            f"remote_indices: piece {at} has {remote[at]} bytes, and {local[at]} on this side",
            param="remote_indices",
        )


def _row(index: int, item: Any) -> tuple[int, int, int]:
    try:
        address, num_bytes, device = (int(number) for number in item[:3])
    except (TypeError, ValueError, IndexError):
        raise InvalidRequestError(
            f"descs: item {index} is not (address, bytes, device id)", param="descs"
        ) from None
    if address <= 0 or num_bytes <= 0 or device < 0 or address + num_bytes > _MAX_END:
        raise InvalidRequestError(
            f"descs: item {index} is {num_bytes} bytes at {address:#x} of device {device}",
            param="descs",
        )
    return address, num_bytes, device
