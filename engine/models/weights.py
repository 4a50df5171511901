"""A model's weights, from the safetensors files of its folder into fused tensors."""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from tandem.engine.loading.checkpoint import Checkpoint
from tandem.engine.loading.weight_readers import cut, lane_for, num_readers, read_pieces
from tandem.engine.models.config import ModelConfig

logger = logging.getLogger(__name__)

_PROGRESS_FROM_BYTES = 1 << 30  # less than this is there before a bar could be read


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


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Weights of `config`'s shape on `device`, of any content; tied embeddings are one tensor."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    num_qk_heads = config.num_heads + config.num_kv_heads
    layers = tuple(
        LayerWeights(
            input_norm=empty(hidden),
            qkv=empty((num_qk_heads + config.num_kv_heads) * config.head_dim, hidden),
            qk_norm=empty(num_qk_heads, config.head_dim) if config.qk_norm else None,
            output=empty(hidden, q_size),
            post_norm=empty(hidden),
            gate_up=empty(2 * inner, hidden),
            down=empty(hidden, inner),
        )
        for _ in range(config.num_layers)
    )
    embedding = empty(config.vocab_size, hidden)
    tied = config.tie_word_embeddings
    lm_head = embedding if tied else empty(config.vocab_size, hidden)
    return ModelWeights(embedding, layers, empty(hidden), lm_head)


def load_weights(
    folder: str | Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """The weights in `folder`, cast and fused. Raises ModelError naming file and tensor.

    Every tensor is allocated on `device` first and filled from the files by several threads. Host
    memory beyond the weights of a CPU is a few MiB per thread. Blocks.
    """
    started = time.perf_counter()
    checkpoint = Checkpoint(folder)
    # On no device at first: a complaint about a tensor comes before its memory is taken.
    planned = empty_weights(config, dtype, torch.device("meta"))
    stored = [checkpoint.find(name, *part.shape) for name, part in _parts(planned, config)]
    weights = empty_weights(config, dtype, device)
    parts = (part for _, part in _parts(weights, config))
    pieces = cut(zip(stored, parts, strict=True))
    num_bytes = sum(piece.num_bytes for piece in pieces)
    lanes = [lane_for(device) for _ in range(min(num_readers(), len(pieces)))]
    with _progress(num_bytes) as progress:
        bar = progress.add_task("weights", total=num_bytes)
        read_pieces(pieces, lanes, lambda advance: progress.update(bar, advance=advance))
    for layer in weights.layers:
        spread_qk_norm(layer, config)
    seconds, num_gib = time.perf_counter() - started, num_bytes / 2**30
    logger.info(
        "%s: %.2f GiB of weights on %s in %.1f s, %.2f GiB/s by %d threads",
        *(folder, num_gib, device, seconds, num_gib / seconds, len(lanes)),
    )
    return weights


def spread_qk_norm(layer: LayerWeights, config: ModelConfig) -> None:
    """Copies the first query head's and the first key head's row to the others of their kind."""
    if layer.qk_norm is not None:
        for rows in torch.split(layer.qk_norm, [config.num_heads, config.num_kv_heads]):
            rows[1:] = rows[0]


def _parts(weights: ModelWeights, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Each stored tensor's name and the contiguous part of `weights` that it fills."""
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q, k, v = torch.split(layer.qkv, [q_size, kv_size, kv_size])
        gate, up = layer.gate_up.chunk(2)
        yield f"{prefix}.input_layernorm.weight", layer.input_norm
        yield f"{attn}.q_proj.weight", q
        yield f"{attn}.k_proj.weight", k
        yield f"{attn}.v_proj.weight", v
        if layer.qk_norm is not None:
            yield f"{attn}.q_norm.weight", layer.qk_norm[0]
            yield f"{attn}.k_norm.weight", layer.qk_norm[config.num_heads]
        yield f"{attn}.o_proj.weight", layer.output
        yield f"{prefix}.post_attention_layernorm.weight", layer.post_norm
        yield f"{mlp}.gate_proj.weight", gate
        yield f"{mlp}.up_proj.weight", up
        yield f"{mlp}.down_proj.weight", layer.down
    yield "model.embed_tokens.weight", weights.embedding
    if not config.tie_word_embeddings:
        yield "lm_head.weight", weights.lm_head
    yield "model.norm.weight", weights.final_norm


def _progress(num_bytes: int) -> Progress:
    """A bar on standard error, on a terminal and for a large model only."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True))
    shown = console.is_terminal and num_bytes >= _PROGRESS_FROM_BYTES
    return Progress(
        *columns, TransferSpeedColumn(), console=console, transient=True, disable=not shown
    )
