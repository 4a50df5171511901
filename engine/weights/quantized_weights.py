"""The quantized matrices among a model's weights: found, read beside the rest, and fused."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from tandem.engine.architecture.quantization import Quantization
from tandem.engine.architecture.shard import Shard
from tandem.engine.architecture.spec import TensorSpec
from tandem.engine.weights.checkpoint import Checkpoint
from tandem.engine.weights.quantized_forms import (
    StoredMatrix,
    allocate_tensors,
    find_quantized,
    is_quantized,
    read_quantized,
)
from tandem.engine.weights.weight_readers import Target
from tandem.kernels.reference.quantized import QuantizedMatrix
from tandem.runtime.errors import ModelError

if TYPE_CHECKING:  # weights.py imports this file
    from tandem.engine.weights.weights import ModelWeights, WeightPart

Slot = tuple[int | None, str]  # a layer, None: outside of the layers; a field of its weights
_ALWAYS_NUMBERS = ("embedding", "router", "shared_gate")


@dataclass(slots=True)
class QuantizedPart:
    """A stored matrix of a slot, and its tensors as they are in the files."""

    spec: TensorSpec
    stored: StoredMatrix
    tensors: dict[str, torch.Tensor]  # by the suffixes of `stored`; none until `allocate`


QuantizedSlots = dict[Slot, list[QuantizedPart]]


def find_slots(
    checkpoint: Checkpoint,
    form: Quantization | None,
    parts: Iterable["WeightPart"],
    rename: Callable[[str], str],
    shard: Shard | None,
) -> QuantizedSlots:
    """Return the slots whose matrices are quantized in the files; with `shard`, its share of them.

    Raises ModelError for one of which a part is not, and naming a tensor that is missing.
    """
    found: QuantizedSlots = {}
    numbers: dict[Slot, str] = {}
    for part in parts if form else ():
        assert form is not None
        name, spec = rename(part.name), part.spec
        if not _may_be_quantized(spec, form) or not is_quantized(checkpoint, name):
            numbers[part.slot] = name
            continue
        stored = find_quantized(checkpoint, form, name, tuple(part.rows.shape))
        mine = found.setdefault(part.slot, [])
        shares = [(stored.rows, stored.inputs)] if shard is None else shard.parts(spec)
        if shard is not None and spec.is_transposed:  # where they are numbers
            shares = [(rows, inputs) for inputs, rows in shares]
        for rows, inputs in shares:
            mine.append(QuantizedPart(spec, replace(stored, rows=rows, inputs=inputs), {}))
    for slot in found.keys() & numbers.keys():
        raise ModelError(
            f"{checkpoint.folder}: {found[slot][0].stored.name} is quantized and {numbers[slot]} "
            "is not, but they are multiplied as one matrix",
            param=numbers[slot],
        )
    return found


def _may_be_quantized(spec: TensorSpec, form: Quantization) -> bool:
    if form.form == "mxfp4" and not spec.slot.startswith("experts_"):
        return False
    return spec.kind == "matrix" and spec.slot not in _ALWAYS_NUMBERS


def allocate(slots: QuantizedSlots, form: Quantization, device: torch.device) -> Iterator[Target]:
    """Yield what is to be read, with memory for it on `device`."""
    for part in (part for parts in slots.values() for part in parts):
        part.tensors, targets = allocate_tensors(part.stored, form, device)
        yield from targets


def fill(weights: "ModelWeights", slots: QuantizedSlots, form: Quantization) -> "ModelWeights":
    """Return `weights` with the matrices of `slots`, whose tensors have been read and are freed."""
    layers = list(weights.layers)
    for (layer, slot), parts in slots.items():
        matrix = _fused(parts, form)
        if layer is None:
            weights = replace(weights, **{slot: matrix})  # type: ignore[arg-type]
        else:
            layers[layer] = replace(layers[layer], **{slot: matrix})  # type: ignore[arg-type]
    return replace(weights, layers=tuple(layers))


def _fused(parts: Sequence[QuantizedPart], form: Quantization) -> QuantizedMatrix:
    """Return the parts below one another, and the experts of each one after another."""
    by_spec: dict[TensorSpec, list[QuantizedMatrix]] = {}
    for part in parts:
        matrix = read_quantized(part.stored, form, part.tensors)
        part.tensors.clear()
        if part.spec.is_interleaved:
            matrix = matrix.each(_halves)
        by_spec.setdefault(part.spec, []).append(matrix)
    each: list[QuantizedMatrix] = []
    for spec, matrices in by_spec.items():
        each += [_joined(matrices, torch.stack)] if spec.is_per_expert else matrices
    return _joined(each, partial(torch.cat, dim=-2))


def _halves(rows: torch.Tensor) -> torch.Tensor:
    """Return the gates of a matrix whose rows are a gate, the up beside it, and so on; then ups."""
    return torch.cat([rows[..., 0::2, :], rows[..., 1::2, :]], -2)


def _joined(
    matrices: Sequence[QuantizedMatrix], join: Callable[[list[torch.Tensor]], torch.Tensor]
) -> QuantizedMatrix:
    if len({matrix.scales.dtype for matrix in matrices}) > 1:
        matrices = [replace(matrix, scales=matrix.scales.float()) for matrix in matrices]
    first = matrices[0]
    zeros = None
    if any(matrix.zeros is not None for matrix in matrices):
        zeros = join(
            [
                torch.zeros_like(each.scales) if each.zeros is None else each.zeros.to(first.scales)
                for each in matrices
            ]
        )
    return replace(
        first,
        codes=join([matrix.codes for matrix in matrices]),
        scales=join([matrix.scales for matrix in matrices]),
        zeros=zeros,
    )
