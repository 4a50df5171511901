"""The form in which a model's matrices are stored, from the quantization_config of config.json."""

from dataclasses import dataclass
from typing import Literal

from tandem.engine.architecture.json_file import JsonObject
from tandem.runtime.printable import short

Form = Literal["float8", "awq", "gptq", "packed", "mxfp4"]
KEY = "quantization_config"
GROUP_SIZES = (32, 64, 128)  # inputs that may share a scale
_DYNAMIC = {"type": "float", "num_bits": 8, "dynamic": True}  # of input_activations
_NAMES: dict[Form, str] = {
    "float8": "FP8",
    "awq": "AWQ 4 bit",
    "gptq": "GPTQ 4 bit",
    "packed": "compressed-tensors 4 bit",
    "mxfp4": "MXFP4 experts",
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """The stored form of the matrices that are not stored as numbers."""

    form: Form
    group_size: int = 0  # inputs that share a scale; 0: all of them
    group_rows: int = 0  # rows that share one too, of float8; 0: as its scales have it
    zeros: Literal["none", "stored", "stored less one"] = "none"
    # Inputs belong to groups by a tensor (g_idx), without which nobody knows by which.
    has_order: bool = False
    # Products round their inputs to FP8 too. As read: the files are meant so; as it runs: they do.
    rounds_inputs: bool = False

    @property
    def name(self) -> str:
        return _NAMES[self.form]


def read_quantization(*configs: JsonObject) -> Quantization | None:
    """Return the form, by the first of `configs` that has one; None: matrices are numbers."""
    for config in configs:
        if config.data.get(KEY):
            part = config.part(KEY)
            read = part.choice("quant_method", _READERS, "")
            return read(part)  # type: ignore[no-any-return]
    return None


def _fp8(config: JsonObject) -> Quantization:
    _check(config, "fmt", ("e4m3", "float8_e4m3fn"), absent="e4m3")
    size = config.data.get("weight_block_size")
    rows, inputs = (0, 0) if size is None else _block(config, "weight_block_size", size)
    is_dynamic = config.data.get("activation_scheme") == "dynamic"
    return Quantization("float8", inputs, rows, rounds_inputs=is_dynamic)


def _fbgemm_fp8(config: JsonObject) -> Quantization:
    return Quantization("float8")


def _awq(config: JsonObject) -> Quantization:
    _check(config, "bits", (4,))
    _check(config, "zero_point", (True,), absent=True)
    _check(config, "version", ("gemm", "GEMM"), absent="gemm")
    return Quantization("awq", _group_size(config), zeros="stored")


def _gptq(config: JsonObject) -> Quantization:
    _check(config, "bits", (4,))
    _check(config, "checkpoint_format", ("gptq", "gptq_v2"), absent="gptq")
    changes = config.data.get("dynamic") or {}
    if not isinstance(changes, dict) or any(not str(key).startswith("-:") for key in changes):
        raise config.error("dynamic", "forms that differ by module are not supported")
    is_new = config.data.get("checkpoint_format") == "gptq_v2"
    zeros: Literal["stored", "stored less one"] = "stored" if is_new else "stored less one"
    return Quantization("gptq", _group_size(config), zeros=zeros, has_order=config.flag("desc_act"))


def _mxfp4(config: JsonObject) -> Quantization:
    return Quantization("mxfp4", 32)


def _compressed(config: JsonObject) -> Quantization:
    sparsity = config.data.get("sparsity_config")
    if sparsity:
        _check(config.part("sparsity_config"), "format", ("dense",), absent="dense")
    groups = config.part("config_groups")
    if len(groups.data) != 1:
        raise config.error("config_groups", "must be one group of modules")
    group = groups.part(next(iter(groups.data)))
    weights = group.part("weights")
    strategy = weights.data.get("strategy")
    if weights.data.get("type") == "float":
        _check(weights, "num_bits", (8,))
        inputs_form = group.data.get("input_activations")
        is_dynamic = isinstance(inputs_form, dict) and _DYNAMIC.items() <= inputs_form.items()
        if strategy == "block":
            rows, inputs = _block(weights, "block_structure", weights.data.get("block_structure"))
            return Quantization("float8", inputs, rows, rounds_inputs=is_dynamic)
        _check(weights, "strategy", ("tensor", "channel"))
        return Quantization("float8", rounds_inputs=is_dynamic)
    _check(weights, "type", ("int",))
    _check(weights, "num_bits", (4,))
    _check(config, "format", ("pack-quantized",))
    _check(weights, "strategy", ("group", "channel"))
    is_symmetric = weights.with_defaults({"symmetric": True}).flag("symmetric")
    zeros: Literal["none", "stored"] = "none" if is_symmetric else "stored"
    return Quantization(
        "packed",
        _group_size(weights) if strategy == "group" else 0,
        zeros=zeros,
        # Written "weight" the order is that of the inputs again.
        has_order=weights.data.get("actorder") not in (None, False, "weight", "static"),
    )


_READERS = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
METHODS = tuple(_READERS)


def _check(
    config: JsonObject, key: str, supported: tuple[object, ...], absent: object = None
) -> None:
    value = config.data.get(key)
    value = absent if value is None else value
    if value not in supported or isinstance(value, bool) != isinstance(supported[0], bool):
        named = ", ".join(str(each) for each in supported)
        raise config.error(key, f"{short(repr(value))} is not supported; supported: {named}")


def _group_size(config: JsonObject) -> int:
    size = config.data.get("group_size")
    if size == -1 and not isinstance(size, bool):
        return 0
    _check(config, "group_size", GROUP_SIZES)
    return int(config.data["group_size"])


def _block(config: JsonObject, key: str, size: object) -> tuple[int, int]:
    """Return rows and inputs that share a scale."""
    if isinstance(size, list) and len(size) == 2 and all(type(each) is int for each in size):
        rows, inputs = size
        if 0 < rows <= 1 << 12 and inputs in GROUP_SIZES:
            return rows, inputs
    named = ", ".join(str(each) for each in GROUP_SIZES)
    raise config.error(key, f"{short(repr(size))} is not [rows, inputs] with inputs of {named}")
