"""Published forms of quantized matrices: their tensors in the files, and the way to ours.

The formulas are those of the libraries that write the files: DeepSeek's and transformers' FP8,
compressed-tensors, AutoAWQ, AutoGPTQ and its successors, and gpt-oss.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple

import torch

from tandem.engine.architecture.quantization import Form, Quantization
from tandem.engine.weights.checkpoint import CODES, FLOATS, Checkpoint, StoredTensor
from tandem.engine.weights.weight_readers import Target, slices
from tandem.kernels.reference.quantized import INPUT_GROUP, QuantizedMatrix
from tandem.runtime.errors import ModelError

# Which of 8 outputs stand in a word of AWQ, by its 4-bit places in the order of outputs.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_MIDDLE = 8  # a code of 4 bits stands for its value less this
_MOST_FLOAT8_SCALE = 128.0  # kernels multiply it by 2^120
_FLOAT4_BIAS, _MOST_FLOAT4_EXPONENT = 127, 100  # kernels multiply a scale by 2^14
_SCALES = {name: FLOATS[name] for name in ("F32", "F16", "BF16")}
_FLOAT8 = {"F8_E4M3": CODES["F8_E4M3"]}
_WORDS = {"I32": CODES["I32"]}
_INT8 = {"I8": CODES["I8"]}
_BYTES = {"U8": CODES["U8"]}
# Beside a matrix, without a part in its numbers: those of activations and of the KV cache.
UNREAD = (".input_scale", ".input_scale_ub", ".activation_scale", ".weight_shape")
UNREAD_OF_KV = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale")

Shape = tuple[int, ...]


class _Codes(NamedTuple):
    """The tensor of codes of a form."""

    suffix: str
    rows: int  # of the matrix, in one item
    inputs: int
    is_by_inputs: bool = False  # its rows are the inputs


_CODES: dict[Form, _Codes] = {
    "float8": _Codes("weight", 1, 1),
    "awq": _Codes("qweight", 8, 1, is_by_inputs=True),
    "gptq": _Codes("qweight", 1, 8, is_by_inputs=True),
    "packed": _Codes("weight_packed", 1, 8),
    "mxfp4": _Codes("blocks", 1, 2),
}


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix, or stacked ones, of `shape`, with the tensors of its module by their suffixes."""

    name: str  # of the module
    shape: Shape  # [..., out, in]
    tensors: Mapping[str, StoredTensor]
    shapes: Mapping[str, Shape]  # of `tensors`
    rows: range  # that are read
    inputs: range  # of these rows


def is_quantized(checkpoint: Checkpoint, name: str) -> bool:
    """Return True for a matrix that is not in the files as floating-point numbers."""
    return checkpoint.shape(name, FLOATS) is None


def find_quantized(
    checkpoint: Checkpoint, form: Quantization, name: str, shape: Shape
) -> StoredMatrix:
    """Locate the tensors of matrix `name`. Raise ModelError naming one that is not as it must be.

    `shape` is [out, in], with the experts before it where they are stacked.
    """
    module = name.removesuffix(".weight")
    finder = _Finder(checkpoint, module, {}, {})
    out_size, in_size = shape[-2:]
    unit = 8 if form.form == "float8" else form.group_size or 8
    if in_size % unit:
        raise ModelError(
            f"{checkpoint.folder}: {module}: {in_size} inputs are not a multiple of {unit}, "
            f"which {form.name} needs",
            param=name,
        )
    num_groups = -(-in_size // form.group_size) if form.group_size else 1
    if form.form == "float8":
        finder.add(("weight",), _FLOAT8, (out_size, in_size))
        scales: list[Shape] = [(), (1,), (out_size, 1), (out_size,)]
        if form.group_size:
            scales = [(-(-out_size // form.group_rows), num_groups)]
        finder.add(("weight_scale_inv", "weight_scale"), _SCALES, *scales)
    elif form.form == "mxfp4":
        finder.separator = "_"
        finder.add(("blocks",), _BYTES, (*shape[:-1], num_groups, form.group_size // 2))
        finder.add(("scales",), _BYTES, (*shape[:-1], num_groups))
    elif form.form == "packed":
        finder.add(("weight_packed",), _WORDS, (out_size, in_size // 8))
        finder.add(("weight_scale",), _SCALES, (out_size, num_groups))
        packed_zeros = -(-out_size // 8), num_groups
        if form.zeros != "none":
            finder.add(("weight_zero_point",), _WORDS, packed_zeros)
        else:  # some writers store those of a symmetric form too
            either = packed_zeros, (out_size, num_groups)
            finder.add_if_there("weight_zero_point", _WORDS | _INT8, *either)
        finder.add_if_there("weight_g_idx", _WORDS, (in_size,))
    else:
        by_outputs = (in_size, out_size // 8)
        finder.add(
            ("qweight",), _WORDS, by_outputs if form.form == "awq" else (in_size // 8, out_size)
        )
        finder.add(("scales",), _SCALES, (num_groups, out_size))
        finder.add(("qzeros",), _WORDS, (num_groups, out_size // 8))
        finder.add_if_there("g_idx", _WORDS, (in_size,))
    whole = range(out_size), range(in_size)
    return StoredMatrix(module, shape, finder.tensors, finder.shapes, *whole)


def allocate_tensors(
    stored: StoredMatrix, form: Quantization, device: torch.device
) -> tuple[dict[str, torch.Tensor], list[Target]]:
    """Return memory for the tensors of a matrix, by suffix, and what is to be read into it.

    Of the codes these are the rows and inputs that are wanted, and all of the smaller tensors.
    """
    tensors: dict[str, torch.Tensor] = {}
    targets: list[Target] = []
    codes = _CODES[form.form]
    for suffix, tensor in stored.tensors.items():
        shape = stored.shapes[suffix]
        if suffix == codes.suffix:
            *outer, out_size, in_size = stored.shape
            sizes = out_size // codes.rows, in_size // codes.inputs
            spans = _items(stored.rows, codes.rows), _items(stored.inputs, codes.inputs)
            if codes.is_by_inputs:
                sizes, spans = sizes[::-1], spans[::-1]
            shape = (*outer, *map(len, spans))
        tensors[suffix] = torch.empty(shape, dtype=tensor.dtype, device=device)
        if suffix == codes.suffix:
            targets += slices(tensor, tensors[suffix], sizes, *spans)
        else:
            targets.append(Target(tensor, tensors[suffix]))
    return tensors, targets


def _items(numbers: range, of_item: int) -> range:
    assert numbers.start % of_item == numbers.stop % of_item == 0
    return range(numbers.start // of_item, numbers.stop // of_item)


@dataclass(slots=True)
class _Finder:
    checkpoint: Checkpoint
    module: str
    tensors: dict[str, StoredTensor]
    shapes: dict[str, Shape]
    separator: str = "."

    def add(
        self, suffixes: tuple[str, ...], dtypes: Mapping[str, torch.dtype], *shapes: Shape
    ) -> None:
        """Locate the first of `suffixes` that is there, in one of `shapes`."""
        names = [f"{self.module}{self.separator}{suffix}" for suffix in suffixes]
        name = next((each for each in names if each in self.checkpoint), names[0])
        found = self.checkpoint.shape(name, dtypes)
        shape = found if found in shapes else shapes[0]
        self.tensors[suffixes[0]] = self.checkpoint.find(name, *shape, dtypes=dtypes)
        self.shapes[suffixes[0]] = shape

    def add_if_there(self, suffix: str, dtypes: Mapping[str, torch.dtype], *shapes: Shape) -> None:
        if f"{self.module}{self.separator}{suffix}" in self.checkpoint:
            self.add((suffix,), dtypes, *shapes)


def read_quantized(
    stored: StoredMatrix, form: Quantization, tensors: Mapping[str, torch.Tensor]
) -> QuantizedMatrix:
    """Return the matrix of a module from its tensors, by suffix. Raise ModelError naming one."""
    reader = _Reader(stored, form, tensors)
    matrix = {
        "float8": reader.float8,
        "mxfp4": reader.mxfp4,
        "packed": reader.packed,
        "awq": reader.awq,
        "gptq": reader.gptq,
    }[form.form]()
    return _with_scales_of(matrix, stored).each(torch.Tensor.contiguous)


def _with_scales_of(matrix: QuantizedMatrix, stored: StoredMatrix) -> QuantizedMatrix:
    """Return the part of a matrix whose codes are read, from these and the scales of all of it.

    Inputs of a group that is parted have its scale in smaller groups.
    """
    size, inputs = matrix.group_size, stored.inputs
    if matrix.scales.shape[-1] > 1:
        size = gcd(size, inputs.start)
    starts = torch.arange(inputs.start, inputs.stop, size, device=matrix.device)

    def of_part(scales: torch.Tensor) -> torch.Tensor:
        rows = scales[..., stored.rows.start : stored.rows.stop, :]
        return rows[..., starts // matrix.group_size]

    zeros = None if matrix.zeros is None else of_part(matrix.zeros)
    return replace(matrix, scales=of_part(matrix.scales), group_size=size, zeros=zeros)


@dataclass(frozen=True, slots=True)
class _Reader:
    stored: StoredMatrix
    form: Quantization
    tensors: Mapping[str, torch.Tensor]

    @property
    def group_size(self) -> int:
        return self.form.group_size or self.stored.shape[-1]

    def float8(self) -> QuantizedMatrix:
        codes = self.tensors["weight"].view(torch.uint8)
        if bool(((codes & 127) == 127).any()):
            raise self._error("weight", "not all numbers are finite")
        scales, num_rows = self._scales("weight_scale_inv"), self.stored.shape[-2]
        if bool((scales.abs() > _MOST_FLOAT8_SCALE).any()):
            raise self._error("weight_scale_inv", f"a scale is above {_MOST_FLOAT8_SCALE:g}")
        if self.form.group_size:
            scales = scales.repeat_interleave(self.form.group_rows, 0)[:num_rows]
        else:
            scales = scales.view(-1, 1).expand(num_rows, 1)
        rounds_inputs = self.form.rounds_inputs and self.form.group_size in (0, INPUT_GROUP)
        return QuantizedMatrix(
            "float8", codes, scales, self.group_size, rounds_inputs=rounds_inputs
        )

    def mxfp4(self) -> QuantizedMatrix:
        exponents = self.tensors["scales"]
        if bool((exponents > _FLOAT4_BIAS + _MOST_FLOAT4_EXPONENT).any()):
            raise self._error("scales", f"a scale is above 2^{_MOST_FLOAT4_EXPONENT}")
        scales = (exponents.float() - _FLOAT4_BIAS).exp2().to(torch.bfloat16)
        return QuantizedMatrix("float4", self.tensors["blocks"].flatten(2), scales, 32)

    def packed(self) -> QuantizedMatrix:
        self._refuse_order("weight_g_idx")
        scales = self._scales("weight_scale")
        zeros = None
        words = self.tensors.get("weight_zero_point")
        if words is not None and words.dtype == torch.int8:  # as numbers, which are added to none
            if bool(words.any()):
                raise self._error("weight_zero_point", "is not 0, although the form is symmetric")
        elif words is not None:  # [ceil(out / 8), num_groups]
            zeros = _codes(words.T)[:, : len(scales)].T
        return self._int4(self.tensors["weight_packed"].view(torch.uint8), scales, zeros)

    def awq(self) -> QuantizedMatrix:
        codes = _codes(self.tensors["qweight"], _AWQ_PLACES).T.contiguous()  # [out, in]
        zeros = _codes(self.tensors["qzeros"], _AWQ_PLACES).T
        pairs = codes[:, 0::2] | codes[:, 1::2] << 4
        return self._int4(pairs, self._scales("scales").T, zeros)

    def gptq(self) -> QuantizedMatrix:
        self._refuse_order("g_idx")
        words = self.tensors["qweight"].T.contiguous()  # [out, in / 8]
        zeros = _codes(self.tensors["qzeros"]).T + int(self.form.zeros == "stored less one")
        return self._int4(words.view(torch.uint8), self._scales("scales").T, zeros)

    def _int4(
        self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None
    ) -> QuantizedMatrix:
        if zeros is not None:
            zeros = zeros.to(scales.dtype) - _MIDDLE
            zeros = zeros if bool(zeros.any()) else None
        return QuantizedMatrix("int4", codes, scales, self.group_size, zeros)

    def _scales(self, suffix: str) -> torch.Tensor:
        scales = self.tensors[suffix]
        if not bool(scales.isfinite().all()):
            raise self._error(suffix, "not all scales are finite")
        if bool((scales < 0).any()):
            raise self._error(suffix, "a scale is below 0")
        return scales

    def _refuse_order(self, suffix: str) -> None:
        """Raise ModelError where inputs do not belong to groups in their order."""
        groups = self.tensors.get(suffix)
        if groups is None:
            if self.form.has_order and self.form.group_size:
                raise ModelError(
                    f"{self.stored.name}: no safetensors file has {self.stored.name}.{suffix}, "
                    "although inputs are ordered by it (desc_act, actorder)",
                    param=f"{self.stored.name}.{suffix}",
                )
            return
        ordered = torch.arange(len(groups), device=groups.device) // self.group_size
        if not torch.equal(groups.long(), ordered):
            raise self._error(suffix, "act order (desc_act, actorder) is not supported")

    def _error(self, suffix: str, problem: str) -> ModelError:
        tensor = self.stored.tensors[suffix]
        return ModelError(f"{tensor.path}: tensor {tensor.name}: {problem}", param=tensor.name)


def _codes(words: torch.Tensor, places: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Return the 4-bit codes [n, 8 * m] at the places of words [n, m], as uint8."""
    shifts = torch.tensor(places, dtype=torch.int32, device=words.device) * 4
    return ((words[:, :, None] >> shifts) & 15).to(torch.uint8).flatten(1)
