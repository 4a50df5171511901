"""vLLM's KV pool as Tandem's transfers see it: a block per layer for every block of tokens.

vLLM keeps one piece of memory with a region per layer, `[layers, blocks, heads, tokens, K and V]`.
A layer of a block is one contiguous record, so a layer stands for a group of layers of
`tandem.transfer.layout`: its block `b` is record `layer * num_blocks + b`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tandem.runtime.errors import ConfigError
from tandem.runtime.wire.dtypes import ELEMENT_BYTES
from tandem.transfer.layout import KvLayout
from tandem.transfer.transport import Memory

if TYPE_CHECKING:
    import torch


class VllmPool:
    """vLLM's memory as a `KvMemory` of records, without spare blocks."""

    def __init__(self, tensor: "torch.Tensor", layout: KvLayout) -> None:
        self.tensor = tensor  # [num_layers * num_blocks, record bytes]
        self.layout = layout
        self.base_address = tensor.data_ptr()
        self.num_blocks, self.block_bytes = tensor.shape
        self.num_spare_blocks = 0
        self.memory: Memory = "VRAM" if tensor.is_cuda else "DRAM"
        self.device_id = tensor.device.index or 0

    def table(self, block_ids: Sequence[int]) -> list[int]:
        """Return the block table of a handoff: ordinal `i * num_layers + layer` is a record."""
        layers = range(0, self.num_blocks, self.num_blocks // self.layout.num_groups)
        return [first + block_id for block_id in block_ids for first in layers]


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise ConfigError that names the first thing about the engine that has no handoffs."""
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
        raise _refused("kv_load_failure_policy", "set it to recompute: a failed handoff is one")
    for name in ("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size",
                 "prefill_context_parallel_size"):  # fmt: skip
        if getattr(parallel, name, 1) != 1:
            raise _refused(
                name, f"is {getattr(parallel, name)}; handoffs have tensor parallelism alone"
            )
    if vllm_config.speculative_config is not None:
        raise _refused("speculative_config", "speculative decoding has no handoffs")
    groups = kv_cache_config.kv_cache_groups
    for group in groups:
        kind = type(group.kv_cache_spec).__name__
        if kind != "FullAttentionSpec":
            name = group.layer_names[0]
            raise _refused("kv_cache_spec", f"{name}: layers of {kind} have no handoffs")
    if len(groups) != 1:
        raise _refused("kv_cache_groups", f"the model has {len(groups)} kinds of KV blocks, not 1")
    spec = groups[0].kv_cache_spec
    if spec.non_causal:
        raise _refused("non_causal", f"{groups[0].layer_names[0]}: KV that depends on later tokens "
                       "has no handoffs")  # fmt: skip
    layout = layout_of(kv_cache_config)
    if spec.page_size_bytes != layout.block_bytes:
        raise _refused("kv_cache_dtype", f"a block of a layer is {spec.page_size_bytes} bytes, "
                       f"not {layout.block_bytes}")  # fmt: skip
    tensors = kv_cache_config.kv_cache_tensors
    if len(tensors) != 1 or not _is_by_layers(tensors[0], spec.page_size_bytes, kv_cache_config):
        raise _refused("kv_cache_layout", "the layers do not lie one after another; set LBHNC")


def _is_by_layers(tensor: Any, page_bytes: int, kv_cache_config: Any) -> bool:
    return bool(
        tensor.offset == 0
        and tensor.block_stride == page_bytes
        and tensor.layer_stride == page_bytes * kv_cache_config.num_blocks
        and len(tensor.layers) == len(kv_cache_config.kv_cache_groups[0].layer_names)
    )


def layout_of(kv_cache_config: Any) -> KvLayout:
    """Return the layout of a record, which has one layer, and the heads of this rank."""
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in ELEMENT_BYTES:
        raise _refused("kv_cache_dtype", f"KV of {dtype} has no handoffs")
    return KvLayout(
        num_layers=1,
        num_kv_heads=spec.num_kv_heads,
        block_size=spec.block_size,
        head_dim=spec.head_size,
        dtype=dtype,
        windows=(0,) * len(group.layer_names),
    )


def pool_of(kv_cache_config: Any, kv_caches: "dict[str, torch.Tensor]") -> VllmPool:
    """Return the pool over the registered tensors, which are views of one piece of memory."""
    import torch

    layout = layout_of(kv_cache_config)
    num_records = layout.num_groups * kv_cache_config.num_blocks
    first = kv_caches[kv_cache_config.kv_cache_tensors[0].layers[0]]
    flat = torch.empty(0, dtype=torch.uint8, device=first.device)
    flat.set_(first.untyped_storage())
    records = flat[: num_records * layout.block_bytes].view(num_records, layout.block_bytes)
    return VllmPool(records, layout)


def _refused(name: str, reason: str) -> ConfigError:
    return ConfigError(f"Tandem's connector: {name}: {reason}", param=name)
