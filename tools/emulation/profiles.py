"""Writes the profiles of emulated devices: `python -m tools.emulation.profiles`.

Data sheets and published configurations, and the shares of rates that serving engines reach, make
the costs of a step by one formula, `profile_of`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from tandem.emulation.profile import Profile

ROOM = Path(__file__).resolve().parents[2] / "emulation"
ELEMENT_BYTES = 2  # of weights, K/V and sums over ranks: bfloat16
KV_MEMORY_FRACTION = 0.85  # of the memory, with weights: engine.kv_memory_fraction
WORKSPACE_BYTES = 2e9  # of each device
TILE_TOKENS = 128
STEP_S = 0.8e-3  # launches, sampling, copies to the host
ROW_S = 5e-6  # further for each drawn token
LINK_LATENCY_S = 50e-6
PEER_LATENCY_S = 10e-6  # of one sum over the ranks

# Shares of the rates of data sheets. Those of prompts and of memory are what Tandem reached on an
# H100 (docs/benchmarks.md), the others what engines typically reach.
MEMORY_SHARE = 0.80  # weights and K/V of decode steps
PRODUCT_SHARE = 0.66  # of prompts: products with norms, activations and copies between them
ATTENTION_SHARE = 0.62  # of prompts over paged K/V
PEER_SHARE = 0.6
LINK_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, by its data sheet."""

    title: str
    memory_bytes: float
    memory_bytes_per_s: float
    products_per_s: float  # FLOP/s of dense bfloat16
    peer_bytes_per_s: float  # one direction, to the other devices of a worker
    link_bytes_per_s: float  # one network card for each device


@dataclass(frozen=True, slots=True)
class DenseModel:
    """A dense decoder by its published configuration, on `num_devices` by tensor parallelism."""

    title: str
    num_devices: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int


DEVICES = {
    "h100": Device("NVIDIA H100 SXM5 80 GB", 85.5e9, 3.35e12, 989e12, 450e9, 50e9),
    "h200": Device("NVIDIA H200 SXM5 141 GB", 150.7e9, 4.8e12, 989e12, 450e9, 50e9),
}
MODELS = {
    "llama-3.1-8b": DenseModel("Llama 3.1 8B", 1, 32, 4096, 14_336, 32, 8, 128, 128_256, 131_072),
    "qwen3-32b": DenseModel("Qwen3 32B", 2, 64, 5120, 25_600, 64, 8, 128, 151_936, 40_960),
    "llama-3.1-70b": DenseModel("Llama 3.1 70B", 4, 80, 8192, 28_672, 64, 8, 128, 128_256, 131_072),
}


def profile_of(device: Device, model: DenseModel) -> Profile:
    """Return the profile of a model on devices of one kind.

    With n devices, weights W of layers and V of the head, layers L, hidden size H, query size Q:
      weights_s = 2 (W + V) / (n memory rate)    token_s = 2 W / (n product rate) + sums
      context_s = KV bytes / (n memory rate)     position_s = 4 L Q / (n attention rate)
      step_s    = STEP_S + 2 L latencies         sums = 2 L H * 2 bytes * 2 (n - 1) / n / peer rate
    A rate is the device's times its share.
    """
    n, num_layers = model.num_devices, model.num_layers
    heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    layer_weights = num_layers * model.hidden_size * (heads + 3 * model.intermediate_size)
    head_weights = model.vocab_size * model.hidden_size  # and as many of the embedding
    kv_bytes_per_token = num_layers * 2 * model.num_kv_heads * model.head_dim * ELEMENT_BYTES
    kv_bytes = n * (KV_MEMORY_FRACTION * device.memory_bytes - WORKSPACE_BYTES)
    kv_bytes -= ELEMENT_BYTES * (layer_weights + 2 * head_weights)
    read_per_s = n * device.memory_bytes_per_s * MEMORY_SHARE
    sum_bytes = 2 * num_layers * model.hidden_size * ELEMENT_BYTES * 2 * (n - 1) / n
    sums_s = sum_bytes / (device.peer_bytes_per_s * PEER_SHARE)
    attention_per_s = n * device.products_per_s * ATTENTION_SHARE
    return Profile(
        step_s=STEP_S + (2 * num_layers * PEER_LATENCY_S if n > 1 else 0.0),
        weights_s=ELEMENT_BYTES * (layer_weights + head_weights) / read_per_s,
        token_s=2 * layer_weights / (n * device.products_per_s * PRODUCT_SHARE) + sums_s,
        position_s=4 * num_layers * model.num_heads * model.head_dim / attention_per_s,
        context_s=kv_bytes_per_token / read_per_s,
        row_s=ROW_S,
        tile_tokens=TILE_TOKENS,
        kv_bytes_per_token=kv_bytes_per_token,
        kv_tokens=int(kv_bytes // kv_bytes_per_token) // 64 * 64,
        link_bytes_per_s=n * device.link_bytes_per_s * LINK_SHARE,
        link_latency_s=LINK_LATENCY_S,
        max_position_embeddings=model.max_position_embeddings,
    )


def rendered() -> dict[Path, str]:
    """Return the text of each profile's file."""
    return {
        ROOM / device_name / f"{model_name}.yaml": _text(device, model)
        for device_name, device in DEVICES.items()
        for model_name, model in MODELS.items()
    }


def _text(device: Device, model: DenseModel) -> str:
    values = profile_of(device, model).model_dump(exclude_defaults=True)
    rounded = {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in values.items()
    }
    count = f"{model.num_devices} x " if model.num_devices > 1 else ""
    head = f"# {model.title} in bfloat16 on {count}{device.title}; by tools/emulation/profiles.py\n"
    return head + yaml.safe_dump(rounded, sort_keys=False)


def main() -> None:
    """Write the files and print their paths."""
    for path, text in rendered().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
