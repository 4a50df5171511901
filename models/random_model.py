"""Models of any shape with random weights, for tests and for measuring the stack without a model.

python -m tandem.models.random_model OUT --preset near-zero --num-layers 2
"""

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tandem.engine.architecture.architectures import LLAMA, QWEN2, QWEN3
from tandem.engine.architecture.spec import TensorSpec, model_tensors
from tandem.models.folder import (
    IM_END,
    byte_level_tokenizer,
    write_generation_config,
    write_json,
    write_tokenizer,
)
from tandem.runtime.errors import ModelError

_ARCHITECTURES = {each.model_type: each for each in (LLAMA, QWEN2, QWEN3)}
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MIN_VOCAB_SIZE = 259  # the bytes and three special tokens

# Standard deviation of the logits. The two best of some hundred draws then lie about 1 apart, far
# more than any dtype's rounding, so greedy answers can be compared between implementations.
_LOGIT_STD = 4.0
# Times a matrix's even scale, or the mean of a norm: 1 where nothing stands here.
_SCALES = {
    # Scores with a standard deviation of about 2: attention prefers some tokens to others.
    "self_attn.q_proj.weight": 1.5,
    "self_attn.k_proj.weight": 1.5,
    "self_attn.q_norm.weight": 1.5,
    "self_attn.k_norm.weight": 1.5,
    "self_attn.v_proj.weight": 2.0,
    "self_attn.o_proj.weight": 2.0,
    "mlp.gate_proj.weight": 1.5,
    "mlp.up_proj.weight": 1.5,
    "mlp.down_proj.weight": 1.5,
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a random model; its fields are parameters of `write_random_model`."""

    architecture: str = "qwen3"
    vocab_size: int = 512
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 128
    tie_word_embeddings: bool = True
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 8192
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.architecture not in _ARCHITECTURES:
            raise ModelError(f"architecture {self.architecture!r} is not in {list(_ARCHITECTURES)}")
        if self.dtype not in _DTYPE_BYTES:
            raise ModelError(f"dtype {self.dtype!r} is not in {list(_DTYPE_BYTES)}")
        if self.vocab_size < _MIN_VOCAB_SIZE:
            raise ModelError(f"vocab_size {self.vocab_size} is below {_MIN_VOCAB_SIZE}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


PRESETS = {
    "tiny": ModelShape(),
    # What is left of a request's time is the stack's own.
    "near-zero": ModelShape(
        hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=64
    ),
    # Some milliseconds a step on one CPU core.
    "small": ModelShape(
        vocab_size=32_768,
        hidden_size=768,
        num_layers=16,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=2048,
    ),
    "qwen3-0.6b": ModelShape(
        vocab_size=151_936,
        hidden_size=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=3072,
        rope_theta=1_000_000.0,
        max_position_embeddings=40_960,
        dtype="bfloat16",
    ),
    "llama-3.2-1b": ModelShape(
        architecture="llama",
        vocab_size=128_256,
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=8192,
        rope_scaling={
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        rope_theta=500_000.0,
        max_position_embeddings=131_072,
        dtype="bfloat16",
    ),
}


def write_random_model(
    path: str | Path, *, seed: int = 0, max_shard_bytes: int | None = None, **shape: Any
) -> Path:
    """Write a complete Hugging Face folder at `path`, which is made if missing; return `path`.

    `shape` are fields of a ModelShape. The weights depend on `seed` and the shape alone, not on
    sharding. Raises ModelError for a shape that cannot be.
    """
    return write_shape(Path(path), ModelShape(**shape), seed=seed, max_shard_bytes=max_shard_bytes)


def write_shape(
    path: Path, shape: ModelShape, *, seed: int = 0, max_shard_bytes: int | None = None
) -> Path:
    """Write a model of a shape that is already made, as `write_random_model` does."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level_tokenizer(shape.vocab_size)
    write_json(path / "config.json", hugging_face_config(shape, tokenizer))
    write_tokenizer(path, tokenizer, max_length_tokens=shape.max_position_embeddings)
    write_generation_config(path, tokenizer)
    _write_weights(path, shape, seed, max_shard_bytes)
    return path


def hugging_face_config(shape: ModelShape, tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json of a model of this shape; `tokenizer` says which id ends an answer."""
    return {
        "architectures": [_ARCHITECTURES[shape.architecture].name],
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(IM_END),
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "mlp_bias": False,
        "model_type": shape.architecture,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": shape.rope_scaling,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "torch_dtype": shape.dtype,
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


@dataclass(frozen=True, slots=True)
class _Weight:
    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0


def _weights(shape: ModelShape) -> Iterator[_Weight]:
    """Yield every tensor, scaled so that each layer's output outweighs the embedding.

    Otherwise tied embeddings make a model that repeats its last token, and no test would notice a
    wrong KV cache.
    """
    layer_tensors = _ARCHITECTURES[shape.architecture].tensors(())
    for layer in range(shape.num_layers):
        for spec in layer_tensors:
            yield _weight(f"model.layers.{layer}.", spec, shape)
    for spec in model_tensors(shape.tie_word_embeddings):
        yield _weight("", spec, shape)


def _weight(prefix: str, spec: TensorSpec, shape: ModelShape) -> _Weight:
    stored_shape = spec.stored_shape(shape)
    scale = _SCALES.get(spec.name, 1.0)
    std = {"matrix": scale * stored_shape[-1] ** -0.5, "norm": 0.1, "bias": 0.5}[spec.kind]
    mean = scale if spec.kind == "norm" else 0.0
    if spec.name == "model.norm.weight":
        std, mean = 0.1 * _LOGIT_STD, _LOGIT_STD
    return _Weight(prefix + spec.name, stored_shape, std, mean)


def _write_weights(path: Path, shape: ModelShape, seed: int, max_shard_bytes: int | None) -> None:
    import torch  # not at the top: `PRESETS` is read by processes that have no torch
    from safetensors.torch import save_file

    def draw(weight: _Weight) -> torch.Tensor:
        # Seeded by name: every tensor is the same however many come before it.
        digest = hashlib.blake2b(f"{seed}/{weight.name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        tensor = torch.randn(weight.shape, generator=generator)
        return tensor.mul_(weight.std).add_(weight.mean).to(getattr(torch, shape.dtype))

    item_bytes = _DTYPE_BYTES[shape.dtype]
    shards = _shards(list(_weights(shape)), item_bytes, max_shard_bytes)
    names = ["model.safetensors"]
    if max_shard_bytes is not None:
        names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
        files = {w.name: name for name, shard in zip(names, shards, strict=True) for w in shard}
        total_bytes = sum(_num_bytes(w, item_bytes) for shard in shards for w in shard)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
        write_json(path / "model.safetensors.index.json", index)
    for name, shard in zip(names, shards, strict=True):
        save_file({w.name: draw(w) for w in shard}, path / name, metadata={"format": "pt"})


def _num_bytes(weight: _Weight, item_bytes: int) -> int:
    num_items = 1
    for size in weight.shape:
        num_items *= size
    return num_items * item_bytes


def _shards(
    weights: list[_Weight], item_bytes: int, max_shard_bytes: int | None
) -> list[list[_Weight]]:
    """Consecutive weights, as many per shard as fit; one that is too large has its own shard."""
    if max_shard_bytes is None:
        return [weights]
    shards: list[list[_Weight]] = []
    used_bytes = 0
    for weight in weights:
        num_bytes = _num_bytes(weight, item_bytes)
        if not shards or used_bytes + num_bytes > max_shard_bytes:
            shards.append([])
            used_bytes = 0
        shards[-1].append(weight)
        used_bytes += num_bytes
    return shards


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: a preset, with any field of its shape replaced."""
    parser = argparse.ArgumentParser(prog="python -m tandem.models.random_model")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-shard-bytes", type=int)
    defaults = asdict(PRESETS["tiny"])
    for field in fields(ModelShape):
        flag = "--" + field.name.replace("_", "-")
        if field.name == "tie_word_embeddings":
            parser.add_argument(flag, action=argparse.BooleanOptionalAction)
        elif field.name == "rope_scaling":
            parser.add_argument(flag, type=json.loads, help="as JSON")
        else:
            parser.add_argument(flag, type=type(defaults[field.name]))
    options = vars(parser.parse_args(argv))
    path, seed, max_shard_bytes = (options.pop(k) for k in ("out", "seed", "max_shard_bytes"))
    shape = PRESETS[options.pop("preset")]
    given = {name: value for name, value in options.items() if value is not None}
    try:
        write_shape(path, replace(shape, **given), seed=seed, max_shard_bytes=max_shard_bytes)
    except ModelError as error:
        parser.error(error.message)
    print(path)


if __name__ == "__main__":
    main()
