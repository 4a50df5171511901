"""Which kernels a model computes with: Triton's, or their PyTorch twins."""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from tandem.runtime.errors import ConfigError

Kind = Literal["torch", "triton"]


@dataclass(slots=True, frozen=True)
class Kernels:
    """What a model and its sampler call, each as in its file in tandem.kernels or its twin's."""

    embed: Callable[..., None]
    rms_norm: Callable[..., None]
    add_rms_norm: Callable[..., None]
    store_qkv: Callable[..., None]
    paged_decode_attention: Callable[..., None]
    prefill_attention: Callable[..., None]
    silu_mul: Callable[..., None]
    sample: Callable[..., None]


def choose_kernels(asked: str, device: torch.device) -> Kind:
    """ "auto" resolved. Raises ConfigError for kernels that `device` cannot run."""
    if asked == "torch" or (asked == "auto" and device.type == "cpu"):
        return "torch"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError('kernels "triton" on a CPU need TRITON_INTERPRET=1', param="kernels")
    return "triton"


def load_kernels(kind: Kind) -> Kernels:
    """The kernels of one kind. Triton exists on Linux only and is not loaded for the twins."""
    # A twin stands in reference/ under its kernel's file name and function name.
    folder = "tandem.kernels" if kind == "triton" else "tandem.kernels.reference"
    norm = importlib.import_module(f"{folder}.norm")
    return Kernels(
        embed=importlib.import_module(f"{folder}.embedding").embed,
        rms_norm=norm.rms_norm,
        add_rms_norm=norm.add_rms_norm,
        store_qkv=importlib.import_module(f"{folder}.kv_store").store_qkv,
        paged_decode_attention=importlib.import_module(
            f"{folder}.paged_attention"
        ).paged_decode_attention,
        prefill_attention=importlib.import_module(f"{folder}.prefill_attention").prefill_attention,
        silu_mul=importlib.import_module(f"{folder}.activation").silu_mul,
        sample=importlib.import_module(f"{folder}.sampling").sample,
    )
