"""A model's weights, from the safetensors files of its folder into fused tensors."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from tandem.engine.architecture.config import ModelConfig
from tandem.engine.architecture.rope import head_order
from tandem.engine.architecture.shard import Shard
from tandem.engine.architecture.spec import TensorSpec, model_tensors
from tandem.engine.weights.checkpoint import Checkpoint, StoredTensor
from tandem.engine.weights.quantized_forms import UNREAD, UNREAD_OF_KV
from tandem.engine.weights.quantized_weights import Slot, allocate, fill, find_slots
from tandem.engine.weights.weight_readers import (
    Target,
    cut,
    lane_for,
    num_readers,
    read_pieces,
    slices,
)
from tandem.kernels.reference.quantized import Matrix
from tandem.runtime.errors import ModelError
from tandem.runtime.process.progress import ProgressBar

logger = logging.getLogger(__name__)

_COMPUTED = "rotary_emb.inv_freq"  # in old files; computed from config.json
_MOST_NAMED = 5  # tensors in a warning


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Query, key and value are one matrix, and so are gate and up.

    A norm that is None does not exist: its input is passed on as it is.
    """

    qkv: Matrix  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    output: Matrix  # [hidden_size, num_heads * head_dim]
    gate_up: Matrix | None = None  # [2 * width, hidden_size], of a shared expert too
    down: Matrix | None = None  # [hidden_size, width]
    input_norm: torch.Tensor | None = None  # [hidden_size] of the attention's input
    attention_out_norm: torch.Tensor | None = None  # [hidden_size] of what attention adds
    post_norm: torch.Tensor | None = None  # [hidden_size] of the feed-forward layer's input
    mlp_out_norm: torch.Tensor | None = None  # [hidden_size] of what the feed-forward layer adds
    qk_norm: torch.Tensor | None = None  # [num_heads + num_kv_heads, head_dim], a row per head
    wide_q_norm: torch.Tensor | None = None  # [num_heads * head_dim], over all heads at once
    wide_k_norm: torch.Tensor | None = None  # [num_kv_heads * head_dim]
    qkv_bias: torch.Tensor | None = None  # [(num_heads + 2 * num_kv_heads) * head_dim]
    output_bias: torch.Tensor | None = None  # [hidden_size]
    gate_up_bias: torch.Tensor | None = None  # [2 * intermediate_size]
    down_bias: torch.Tensor | None = None  # [hidden_size]
    sinks: torch.Tensor | None = None  # [num_heads] scores of a position without a value
    router: torch.Tensor | None = None  # [num_experts, hidden_size]
    router_bias: torch.Tensor | None = None  # [num_experts]
    router_correction: torch.Tensor | None = None  # [num_experts] float32, of the choice alone
    experts_gate_up: Matrix | None = None  # [num_experts, 2 * width, hidden_size]
    experts_gate_up_bias: torch.Tensor | None = None  # [num_experts, 2 * width]
    experts_down: Matrix | None = None  # [num_experts, hidden_size, width]
    experts_down_bias: torch.Tensor | None = None  # [num_experts, hidden_size]
    shared_gate: torch.Tensor | None = None  # [1, hidden_size] of the shared expert's results


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All of a model's weights on one device; `lm_head` may be `embedding` itself."""

    embedding: torch.Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [hidden_size]
    lm_head: Matrix  # [vocab_size, hidden_size]


class WeightPart(NamedTuple):
    """A stored tensor and the contiguous rows of a fused tensor that belong to it."""

    name: str  # in the files
    layer: int | None  # None: outside of the layers
    spec: TensorSpec
    rows: torch.Tensor  # spec.slot_shape, without the experts where each has a tensor

    @property
    def slot(self) -> Slot:
        return self.layer, self.spec.slot

    @property
    def stored(self) -> torch.Tensor:
        """The destination of the stored tensor: all rows, or the first of its copies."""
        rows = self.rows if self.spec.repeats is None else self.rows[0]
        if self.spec.is_transposed:
            return rows.view(*rows.shape[:-2], rows.shape[-1], rows.shape[-2])
        return rows

    def settle(self) -> None:
        """Bring the stored tensor into the form of its slot: in its order, and in all copies."""
        if self.spec.repeats is not None:
            self.rows[1:] = self.rows[0]
        if self.spec.is_transposed or self.spec.is_interleaved:
            for rows, stored in zip(self.rows, self.stored, strict=True):
                outputs = stored.T if self.spec.is_transposed else stored
                halves = [outputs[0::2], outputs[1::2]] if self.spec.is_interleaved else [outputs]
                rows.copy_(torch.cat(halves).clone())


def empty_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    others: Collection[Slot] = (),
) -> ModelWeights:
    """Allocate weights of `config`'s shape on `device`; tied embeddings are one tensor.

    Those of `others` get no memory.
    """

    def slots(specs: Iterable[TensorSpec], layer: int | None = None) -> dict[str, torch.Tensor]:
        shapes: dict[str, list[int]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for spec in specs:
            shape, axis = list(spec.slot_shape(config)), spec.row_axis
            if spec.slot in shapes:
                shape[axis] += shapes[spec.slot][axis]
            shapes[spec.slot] = shape
            dtypes[spec.slot] = torch.float32 if spec.is_float32 else dtype
        meta = torch.device("meta")
        devices = {slot: meta if (layer, slot) in others else device for slot in shapes}
        return {
            slot: torch.empty(shape, dtype=dtypes[slot], device=devices[slot])
            for slot, shape in shapes.items()
        }

    layers = tuple(
        LayerWeights(**slots(config.layer_tensors(layer), layer))
        for layer in range(config.num_layers)
    )
    outside = slots(model_tensors(config.tie_word_embeddings))
    outside.setdefault("lm_head", outside["embedding"])
    return ModelWeights(layers=layers, **outside)


def weight_parts(
    weights: ModelWeights, config: ModelConfig, *, is_stacked: bool = False
) -> Iterator[WeightPart]:
    """Yield every stored tensor of the model with its part of `weights`."""
    for index, layer in enumerate(weights.layers):
        specs = config.layer_tensors(index, is_stacked=is_stacked)
        yield from _parts(layer, specs, config, index)
    yield from _parts(weights, model_tensors(config.tie_word_embeddings), config, None)


def _parts(
    owner: LayerWeights | ModelWeights,
    specs: Iterable[TensorSpec],
    config: ModelConfig,
    layer: int | None,
) -> Iterator[WeightPart]:
    prefix = "" if layer is None else f"model.layers.{layer}."
    num_used: Counter[str] = Counter()  # rows of each slot
    for spec in specs:
        start = num_used[spec.slot]
        num_rows = spec.slot_shape(config)[spec.row_axis]
        num_used[spec.slot] += num_rows
        rows: torch.Tensor = getattr(owner, spec.slot).narrow(spec.row_axis, start, num_rows)
        if not spec.is_per_expert:
            yield WeightPart(prefix + spec.name, layer, spec, rows)
            continue
        for expert, its_rows in enumerate(rows):
            yield WeightPart(prefix + spec.name.format(expert), layer, spec, its_rows)


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard | None = None,
) -> ModelWeights:
    """Load the weights in `folder`, cast and fused. Raises ModelError naming file and tensor.

    With `shard`, of the model `config`, they are those of its rank alone.

    Every tensor is allocated on `device` first and filled from the files by several threads. Host
    memory beyond the weights of a CPU is a few MiB per thread. Blocks.
    """
    started = time.perf_counter()
    checkpoint = Checkpoint(folder)
    rename = _naming(checkpoint, config)
    if config.tie_word_embeddings:
        checkpoint.check_tied(rename("lm_head.weight"), rename("model.embed_tokens.weight"))
    # On no device at first: an error about a tensor comes before its memory is taken.
    is_stacked = _is_stacked(checkpoint, config)
    nowhere = empty_weights(config, dtype, torch.device("meta"))
    planned = list(weight_parts(nowhere, config, is_stacked=is_stacked))
    quantized = find_slots(checkpoint, config.quantization, planned, rename, shard)
    stored = [
        checkpoint.find(rename(part.name), *part.stored.shape)
        for part in planned
        if part.slot not in quantized
    ]
    mine = config if shard is None else shard.config
    weights = empty_weights(mine, dtype, device, quantized)
    parts = [
        part
        for part in weight_parts(weights, mine, is_stacked=is_stacked)
        if part.slot not in quantized
    ]
    targets = [
        target
        for tensor, part in zip(stored, parts, strict=True)
        for target in _targets(tensor, part, shard)
    ]
    if config.quantization is not None:
        targets += allocate(quantized, config.quantization, device)
    _warn_of_others(folder, checkpoint, {each.stored.name for each in targets}, config)
    pieces = cut(targets)
    num_bytes = sum(piece.num_bytes for piece in pieces)
    lanes = [lane_for(device) for _ in range(min(num_readers(), len(pieces)))]
    with ProgressBar("weights", total=num_bytes, on_line=logger.info) as bar:
        read_pieces(pieces, lanes, bar.advance)
    _check_finite(folder, parts)
    for part in parts:
        part.settle()
    if config.quantization is not None:
        weights = fill(weights, quantized, config.quantization)
    for index, layer in enumerate(weights.layers):
        _reorder_heads(layer, mine, index)
    seconds, num_gib = time.perf_counter() - started, num_bytes / 2**30
    logger.info(
        "%s: %.2f GiB of weights on %s in %.1f s, %.2f GiB/s by %d threads",
        *(folder, num_gib, device, seconds, num_gib / seconds, len(lanes)),
    )
    return weights


def _targets(stored: StoredTensor, part: WeightPart, shard: Shard | None) -> Iterator[Target]:
    """Yield the parts of a stored tensor that are read, with their destinations."""
    if shard is None:
        yield Target(stored, part.stored)
        return
    sizes, mine = part.spec.stored_shape(shard.whole), part.stored
    if len(sizes) == 1:
        sizes, mine = (*sizes, 1), mine[:, None]
    num_rows, num_columns = sizes[-2:]
    first = 0
    for rows, columns in shard.parts(part.spec):
        destination = mine.narrow(-2, first, len(rows))
        first += len(rows)
        yield from slices(stored, destination, (num_rows, num_columns), rows, columns)


def _reorder_heads(layer: LayerWeights, config: ModelConfig, index: int) -> None:
    """Bring the dimensions of queries and keys into the order in which the kernels rotate them."""
    order = head_order(config.layer_kind(index).rope, config.head_dim)
    if order is None:
        return
    num_rotated = config.num_heads + config.num_kv_heads
    norms = None if layer.qk_norm is None else layer.qk_norm.view(-1)
    qkv = layer.qkv
    parts = (qkv,) if isinstance(qkv, torch.Tensor) else (qkv.codes, qkv.scales, qkv.zeros)
    for rows in (*parts, layer.qkv_bias, norms, layer.wide_q_norm, layer.wide_k_norm):
        if rows is not None:
            # [heads, head_dim, ...], without the values of qkv
            heads = rows.view(-1, config.head_dim, *rows.shape[1:])[:num_rotated]
            heads.copy_(heads.index_select(1, order.to(rows.device)))


def _is_stacked(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Return True where the files have the stacked form of the architecture's experts."""
    slot = "experts_gate_up"
    names = {spec.name for spec in config.architecture.stacked_tensors if spec.slot == slot}
    return any(name.endswith(tuple(names)) for name in checkpoint) if names else False


def _naming(checkpoint: Checkpoint, config: ModelConfig) -> Callable[[str], str]:
    """Return the function from names as of a text model to the names in the files."""
    if not config.text_config:
        return lambda name: name
    namings: tuple[Callable[[str], str], ...] = (
        lambda name: f"language_model.{name}",
        lambda name: name.replace("model.", "model.language_model.", 1),
        lambda name: name,
    )
    present = (naming for naming in namings if naming("model.norm.weight") in checkpoint)
    return next(present, namings[0])


def _check_finite(folder: str | Path, parts: Sequence[WeightPart]) -> None:
    """Raise ModelError naming the tensors that hold NaN or an infinity in the dtype that runs.

    Least and largest numbers cost a 16th of a second per GiB on one core, and a NaN is both.
    """
    ends = torch.stack([torch.stack(torch.aminmax(part.stored)) for part in parts])
    bad = [parts[i].name for i in (~ends.isfinite().all(1)).nonzero().flatten().tolist()]
    if bad:
        more = f" and {len(bad) - _MOST_NAMED} more" if len(bad) > _MOST_NAMED else ""
        raise ModelError(
            f"{folder}: not all numbers are finite in {ends.dtype}, in "
            f"{', '.join(bad[:_MOST_NAMED])}{more}",
            param=bad[0],
        )


def _warn_of_others(
    folder: str | Path, checkpoint: Checkpoint, used: set[str], config: ModelConfig
) -> None:
    """Log the tensors that are not loaded: the files may be of another model than config.json."""
    harmless: tuple[str, ...] = (_COMPUTED,)
    if config.tie_word_embeddings:
        harmless += ("lm_head.weight",)
    if config.quantization is not None:
        harmless += UNREAD + UNREAD_OF_KV
    others = sorted(name for name in checkpoint if name not in used and not name.endswith(harmless))
    if config.text_config:
        others = [name for name in others if "language_model." in name]  # the rest is other media
    if others:
        named = ", ".join(others[:_MOST_NAMED]) + (", ..." if len(others) > _MOST_NAMED else "")
        logger.warning(
            "%s: config.json does not ask for %d tensors: %s", folder, len(others), named
        )
