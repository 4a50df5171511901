"""The pool of KV blocks: one allocation for kernels, transport and checksums."""

from collections.abc import Callable
from typing import Any

import torch

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.config import DeviceKind
from tandem.engine.memory.kv_blocks import KvBlocks, Memory, host_pages


class KvCache(KvBlocks):
    """Blocks of keys and values, zeroed; a transport registers them from `base_address` on.

    `allocate` returns zeroed bytes [num_bytes] on a device; None: memory of this process.

    On a GPU the memory is a cudaMalloc of its own: memory of torch's caching allocator may be
    mapped from pieces, over which transports fall back to a fraction of their bandwidth.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        allocate: Callable[[int, int], torch.Tensor] | None = None,
    ) -> None:
        super().__init__(config, num_blocks, block_size, memory_of(device))
        self.device_id = device.index or 0
        if allocate is None:
            allocate = _cuda_bytes if device.type == "cuda" else _host_bytes
        flat = allocate(self.num_bytes, self.device_id)
        self.tensor = flat.view(getattr(torch, config.dtype)).view(self.shape)
        self.base_address = self.tensor.data_ptr()


def memory_of(device: torch.device) -> Memory:
    return "VRAM" if device.type == "cuda" else "DRAM"


def kind_of(device: torch.device) -> DeviceKind:
    return "gpu" if device.type == "cuda" else "cpu"


def _host_bytes(num_bytes: int, _device_id: int) -> torch.Tensor:
    """Return pages of this process; the tensor owns them."""
    return torch.frombuffer(host_pages(num_bytes), dtype=torch.uint8)


def _cuda_bytes(num_bytes: int, device_id: int) -> torch.Tensor:
    # Imported here: CuPy exists only where there is a GPU.
    import cupy

    with cupy.cuda.Device(device_id):
        pointer: Any = cupy.cuda.MemoryPointer(cupy.cuda.Memory(num_bytes), 0)
        tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(
            cupy.ndarray((num_bytes,), dtype=cupy.uint8, memptr=pointer)
        )
    return tensor.zero_()
