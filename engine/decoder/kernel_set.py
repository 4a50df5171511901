"""The kernels that a model computes with: in Triton, in C, or their PyTorch references."""

import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from tandem.engine.architecture.spec import Size
from tandem.engine.batch.batch import Batch, Rows
from tandem.kernels.cpu.build import BuildError, load_library
from tandem.kernels.reference.experts import Experts, ExpertWeights
from tandem.kernels.reference.kv_store import plan_store
from tandem.kernels.reference.linear import Linear, activation_dtype
from tandem.kernels.reference.paged_attention import plan_decode
from tandem.kernels.reference.prefill_attention import plan_prefill
from tandem.kernels.reference.quantized import Matrix
from tandem.kernels.reference.segments import Multiply
from tandem.runtime.errors import ConfigError

FEW_TOKENS = 64  # of a step; a product for so many is bound by the weights it reads

logger = logging.getLogger(__name__)

Kind = Literal["c", "torch", "triton"]

# Files of tandem.kernels by the names of those in tandem.kernels.reference.
_FILES_IN_TRITON = {
    "activation": "layers.activation",
    "embedding": "layers.embedding",
    "experts": "experts.launch",
    "kv_store": "layers.kv_store",
    "linear": "linear.launch",
    "masks": "sampling.masks",
    "norm": "layers.norm",
    "paged_attention": "attention.decode",
    "prefill_attention": "attention.prefill",
    "sampling": "sampling.launch",
}
# Files of tandem.kernels.cpu by the same names; a kernel that is not in C computes with PyTorch.
_FILES_IN_C = {
    "activation": "launch",
    "experts": "experts",
    "kv_store": "launch",
    "linear": "linear",
    "masks": "launch",
    "norm": "launch",
    "paged_attention": "launch",
    "prefill_attention": "launch",
}


@dataclass(slots=True, frozen=True)
class StepOptions:
    """Keyword arguments that a step's kernels take in each layer of one kind, by kernel."""

    store_qkv: Mapping[str, Any] = field(default_factory=dict)
    paged_decode_attention: Mapping[str, Any] = field(default_factory=dict)
    prefill_attention: Mapping[str, Any] = field(default_factory=dict)
    # paged_decode_attention's in the last layer, when it attends for the sampled tokens alone
    sampled_attention: Mapping[str, Any] = field(default_factory=dict)


_NO_OPTIONS = StepOptions()


def _no_options(*_: object) -> StepOptions:
    return _NO_OPTIONS


def _weight_dtype(weight: torch.Tensor) -> torch.dtype:
    return weight.dtype


@dataclass(slots=True, frozen=True)
class FusedProducts:
    """Products with what comes before and after them, for steps of up to `max_tokens`."""

    multiply: Callable[..., torch.Tensor]
    multiply_qkv: Callable[..., torch.Tensor]
    offered: Callable[[int], bool]  # for a head dim, on this chip
    max_tokens: int


@dataclass(slots=True, frozen=True)
class Kernels:
    """The functions that a model and its sampler call, as defined by files of tandem.kernels.

    `pack_linear` returns the multiplication by a weight matrix [out, in], of numbers or quantized,
    `activation_dtype` the dtype of its operands and results, `pack_experts` the sum of the results
    of `route`'s choice. `step_options` computes what the layers of a step share that have one rope
    and one window.
    """

    embed: Callable[..., None]
    rms_norm: Callable[..., None]
    add_rms_norm: Callable[..., None]
    store_qkv: Callable[..., None]
    paged_decode_attention: Callable[..., None]
    prefill_attention: Callable[..., None]
    silu_mul: Callable[..., None]
    gelu_mul: Callable[..., None]
    route: Callable[..., None]
    pack_experts: Callable[[ExpertWeights], Experts]
    pack_linear: Callable[[Matrix], Linear]
    sample: Callable[..., None]
    token_logprobs: Callable[..., None]
    mask_logits: Callable[..., None]
    activation_dtype: Callable[[torch.Tensor], torch.dtype] = _weight_dtype
    fused: FusedProducts | None = None
    # The products of attention's output and of a feed-forward layer's, by the name of the matrix's
    # second size, and of the vocabulary; None: pack_linear.
    pack_output: Callable[[Matrix, Size], Linear] | None = None
    pack_head: Callable[[Matrix], Linear] | None = None
    # x @ weight.T in float32, of which ranks make a product in segments; None: C has its own.
    multiply_in_float32: Multiply | None = None
    # Of experts too, the sum of a token's results, of which each rank has a part.
    pack_experts_in_float32: Callable[[ExpertWeights], Experts] | None = None
    # The product with some rows of a matrix of so many, in the order of sums that all have; None:
    # pack_linear, whose order is one, or any.
    pack_share: Callable[[Matrix, int], Linear] | None = None
    # Products of which ranks have some rows each, by the name of the matrix's first size; None:
    # pack_linear.
    pack_rows: Callable[[Matrix, Size], Linear] | None = None
    step_options: Callable[[Batch, torch.Tensor, torch.Tensor, int, int], StepOptions] = _no_options


def choose_kernels(asked: str, device: torch.device) -> Kind:
    """Resolve "auto". Raises ConfigError for kernels that `device` cannot run."""
    if asked == "torch":
        return "torch"
    if device.type == "cpu" and asked != "triton":
        return _c_or_torch(asked)
    if asked == "c":
        raise ConfigError(f'kernels "c" run on a CPU, not on {device}', param="kernels")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError('kernels "triton" on a CPU need TRITON_INTERPRET=1', param="kernels")
    return "triton"


def _c_or_torch(asked: str) -> Kind:
    try:
        load_library()
    except BuildError as error:
        if asked == "c":
            raise ConfigError(f'kernels "c": {error}', param="kernels") from error
        logger.warning("computing with PyTorch's kernels, which are slower: %s", error)
        return "torch"
    return "c"


def has_float8_products(kind: str) -> bool:
    """Return True for kernels that multiply FP8 by FP8 on this chip."""
    if kind != "triton":
        return False
    return bool(importlib.import_module("tandem.kernels.linear.float8").has_float8_products())


def load_kernels(
    kind: Kind,
    *,
    deterministic: bool = False,
    fused_products: bool = False,
    dependent_launch: bool = False,
    cascade_attention: bool = False,
) -> Kernels:
    """Load the kernels of one kind. Triton, which exists on Linux only, is loaded for its own.

    With `deterministic` no row depends on its batch: on a GPU, cuBLAS is not used. The kernels of
    other kinds compute so in any case. `fused_products` are for few tokens. `dependent_launch` is
    of all kernels of the process. With `cascade_attention` the decodes of a step read the blocks
    that they share together.
    """
    if kind == "triton":
        importlib.import_module("tandem.kernels.dependent_launch").use_dependent_launch(
            dependent_launch
        )

    # A function has one name in all kinds.
    def find(file: str, name: str) -> Callable[..., Any]:
        module = f"tandem.kernels.reference.{file}"
        if kind == "triton":
            module = f"tandem.kernels.{_FILES_IN_TRITON[file]}"
        elif kind == "c" and file in _FILES_IN_C:
            module = f"tandem.kernels.cpu.{_FILES_IN_C[file]}"
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function

    pack_linear = "pack_linear_in_order" if kind == "triton" and deterministic else "pack_linear"
    own: dict[str, Any] = {}
    if kind != "triton":
        own["activation_dtype"] = activation_dtype
    if kind == "torch":
        own["step_options"] = _reference_options
    if kind == "triton":
        own["multiply_in_float32"] = (
            partial(find("linear", "multiply"), out_dtype=torch.float32)
            if deterministic
            else find("linear", "multiply_in_float32")
        )
        own["pack_experts_in_float32"] = find("experts", "pack_experts_in_float32")
        if deterministic:
            own["pack_share"] = find("linear", "pack_share")
    if kind == "triton" and cascade_attention:
        own["step_options"] = partial(_cascade_options, find("paged_attention", "plan_prefixes"))
    if kind == "triton" and (deterministic or fused_products):
        own["fused"] = FusedProducts(
            find("linear", "multiply"),
            find("linear", "multiply_qkv"),
            find("linear", "has_fused_products"),
            sys.maxsize if deterministic else FEW_TOKENS,
        )
    return Kernels(
        embed=find("embedding", "embed"),
        rms_norm=find("norm", "rms_norm"),
        add_rms_norm=find("norm", "add_rms_norm"),
        store_qkv=find("kv_store", "store_qkv"),
        paged_decode_attention=find("paged_attention", "paged_decode_attention"),
        prefill_attention=find("prefill_attention", "prefill_attention"),
        silu_mul=find("activation", "silu_mul"),
        gelu_mul=find("activation", "gelu_mul"),
        route=find("experts", "route"),
        pack_experts=find("experts", "pack_experts"),
        pack_linear=find("linear", pack_linear),
        sample=find("sampling", "sample"),
        token_logprobs=find("sampling", "token_logprobs"),
        mask_logits=find("masks", "mask_logits"),
        **own,
    )


def _reference_options(
    batch: Batch,
    rope_table: torch.Tensor,  # [max_model_len, 2, head_dim]
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], any layer
    num_heads: int,
    window: int,
) -> StepOptions:
    store = plan_store(rope_table, batch.positions, batch.slot_mapping, kv_cache.shape[3])
    group_size = num_heads // kv_cache.shape[2]

    def of_decodes(rows: Rows) -> dict[str, Any]:
        if not len(rows):
            return {}
        where = kv_cache, rows.block_tables, rows.context_lens
        return {"plan": plan_decode(*where, group_size, window=window)}

    prefill: dict[str, Any] = {}
    if len(batch.prefills):
        prefill["plan"] = plan_prefill(
            kv_cache,
            batch.prefills.block_tables,
            batch.prefill_cu_seqlens,
            batch.prefills.context_lens,
            window=window,
        )
    sampled = {} if batch.samples_all else of_decodes(batch.sampled)
    return StepOptions({"plan": store}, of_decodes(batch.decodes), prefill, sampled)


def _cascade_options(
    plan_prefixes: Callable[..., Any],
    batch: Batch,
    _rope_table: torch.Tensor,
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], any layer
    num_heads: int,
    window: int,
) -> StepOptions:
    if window:
        return StepOptions()
    group_size = num_heads // kv_cache.shape[2]

    def of_decodes(rows: Rows) -> dict[str, Any]:
        if not len(rows):
            return {}
        where = kv_cache, rows.block_tables, rows.context_lens
        return {"prefixes": plan_prefixes(*where, group_size)}

    sampled = {} if batch.samples_all else of_decodes(batch.sampled)
    return StepOptions(paged_decode_attention=of_decodes(batch.decodes), sampled_attention=sampled)
