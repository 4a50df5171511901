"""A model's weights, from the safetensors files of its folder into fused tensors."""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from tandem.engine.model_config import ModelConfig
from tandem.runtime.errors import ModelError

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Query, key and value are one matrix, and so are gate and up."""

    input_norm: torch.Tensor  # [hidden_size]
    qkv: torch.Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    qk_norm: torch.Tensor | None  # [num_heads + num_kv_heads, head_dim], a row per head
    output: torch.Tensor  # [hidden_size, num_heads * head_dim]
    post_norm: torch.Tensor  # [hidden_size]
    gate_up: torch.Tensor  # [2 * intermediate_size, hidden_size]
    down: torch.Tensor  # [hidden_size, intermediate_size]


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All of a model's weights on one device; `lm_head` may be `embedding` itself."""

    embedding: torch.Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [hidden_size]
    lm_head: torch.Tensor  # [vocab_size, hidden_size]


class Checkpoint:
    """The safetensors files of a model folder, single or sharded, open for reading."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}  # file name |-> open file
        self._where = self._locate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def read(self, name: str, *shape: int) -> torch.Tensor:
        """Tensor `name` in host memory. Raises ModelError when missing or of another shape."""
        file_name = self._where.get(name)
        if file_name is None:
            raise ModelError(f"{self._folder}: no safetensors file has tensor {name}", param=name)
        path = self._folder / file_name
        try:
            tensor: torch.Tensor = self._open(file_name).get_tensor(name)
        except (OSError, SafetensorError) as exc:
            raise ModelError(f"{path}: tensor {name}: {exc}", param=name) from exc
        if tensor.shape != shape:
            raise ModelError(
                f"{path}: tensor {name} has shape {list(tensor.shape)}, "
                f"config.json asks for {list(shape)}",
                param=name,
            )
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            raise ModelError(f"{path}: tensor {name} has dtype {tensor.dtype}", param=name)
        return tensor

    def _locate(self) -> dict[str, str]:
        index_path = self._folder / INDEX_NAME
        if index_path.exists():
            try:
                weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
                located = {str(name): str(file_name) for name, file_name in weight_map.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as exc:
                raise ModelError(f"{index_path}: no readable weight_map: {exc!r}") from exc
            self._check_file_names(index_path, set(located.values()))
            return located
        file_names = sorted(path.name for path in self._folder.glob("*.safetensors"))
        if not file_names:
            raise ModelError(f"{self._folder}: no *.safetensors file")
        return {
            str(name): file_name
            for file_name in file_names
            for name in self._open(file_name).keys()  # noqa: SIM118  not a mapping
        }

    def _check_file_names(self, index_path: Path, file_names: set[str]) -> None:
        for file_name in sorted(file_names):
            if Path(file_name).name != file_name:
                raise ModelError(f"{index_path}: weight_map leaves the folder: {file_name!r}")
            if not (self._folder / file_name).exists():
                raise ModelError(f"{self._folder / file_name}: missing, but {INDEX_NAME} names it")

    def _open(self, file_name: str) -> Any:
        if file_name not in self._files:
            path = self._folder / file_name
            try:
                opened = safe_open(str(path), framework="pt")
            except (OSError, SafetensorError) as exc:
                raise ModelError(f"{path}: not a readable safetensors file: {exc}") from exc
            self._files[file_name] = self._stack.enter_context(opened)
        return self._files[file_name]


def load_weights(
    folder: str | Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """The weights in `folder`, cast and fused. Raises ModelError naming file and tensor."""
    with Checkpoint(folder) as checkpoint:
        loader = _Loader(checkpoint, config, dtype, device)
        layers = tuple(loader.layer(index) for index in range(config.num_layers))
        embedding = loader.fuse(("model.embed_tokens", config.vocab_size, config.hidden_size))
        lm_head = embedding
        if not config.tie_word_embeddings:
            lm_head = loader.fuse(("lm_head", config.vocab_size, config.hidden_size))
        final_norm = loader.fuse(("model.norm", config.hidden_size))
    return ModelWeights(embedding, layers, final_norm, lm_head)


class _Loader:
    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._dtype = dtype
        self._device = device

    def fuse(self, *parts: tuple[Any, ...]) -> torch.Tensor:
        """Parts (name, *shape) stacked along their first dimension into memory of our own."""
        tensors = [
            self._checkpoint.read(f"{name}.weight", *shape).to(self._dtype)
            for name, *shape in parts
        ]
        # cat copies: nothing of ours stays a view of a mapped file.
        return torch.cat(tensors).to(self._device)

    def layer(self, index: int) -> LayerWeights:
        config = self._config
        prefix = f"model.layers.{index}"
        attn = f"{prefix}.self_attn"
        hidden = config.hidden_size
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        return LayerWeights(
            input_norm=self.fuse((f"{prefix}.input_layernorm", hidden)),
            qkv=self.fuse(
                (f"{attn}.q_proj", q_size, hidden),
                (f"{attn}.k_proj", kv_size, hidden),
                (f"{attn}.v_proj", kv_size, hidden),
            ),
            qk_norm=self._qk_norm(attn) if config.qk_norm else None,
            output=self.fuse((f"{attn}.o_proj", hidden, q_size)),
            post_norm=self.fuse((f"{prefix}.post_attention_layernorm", hidden)),
            gate_up=self.fuse(
                (f"{prefix}.mlp.gate_proj", config.intermediate_size, hidden),
                (f"{prefix}.mlp.up_proj", config.intermediate_size, hidden),
            ),
            down=self.fuse((f"{prefix}.mlp.down_proj", hidden, config.intermediate_size)),
        )

    def _qk_norm(self, attn: str) -> torch.Tensor:
        config = self._config
        q_norm = self.fuse((f"{attn}.q_norm", config.head_dim))
        k_norm = self.fuse((f"{attn}.k_norm", config.head_dim))
        return torch.cat(
            [q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)]
        )
