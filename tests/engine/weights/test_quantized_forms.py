"""Each published form is read as the numbers that it stands for; damage names its tensor."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.architecture.json_file import JsonObject
from tandem.engine.architecture.quantization import Quantization, read_quantization
from tandem.engine.weights.checkpoint import Checkpoint
from tandem.engine.weights.quantized_forms import find_quantized, is_quantized, read_quantized
from tandem.kernels.reference.quantized import expanded
from tandem.runtime.errors import ModelError
from tests.engine.weights.quantizers import FORMS

NAME = "model.layers.0.mlp.down_proj"
forms = pytest.mark.parametrize("form", FORMS)


def form_of(name: str) -> Quantization:
    config = JsonObject(Path("config.json"), {"quantization_config": FORMS[name][0]})
    form = read_quantization(config)
    assert form is not None
    return form


def write(folder: Path, form: str, *shape: int) -> torch.Tensor:
    """Write a matrix to `folder`; return the numbers."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight[..., 0, :32] *= 20  # a group unlike the others
    tensors, numbers = FORMS[form][1](weight)
    between = "_" if form == "mxfp4" else "."
    stored = {f"{NAME}{between}{suffix}": each for suffix, each in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    return numbers


def read(folder: Path, form: str, *shape: int) -> torch.Tensor:
    checkpoint = Checkpoint(folder)
    assert is_quantized(checkpoint, f"{NAME}.weight")
    found = find_quantized(checkpoint, form_of(form), f"{NAME}.weight", shape)
    stored = load_file(folder / "model.safetensors")
    tensors = {suffix: stored[each.name] for suffix, each in found.tensors.items()}
    return expanded(read_quantized(found, form_of(form), tensors))


@forms
def test_a_matrix_is_read_as_its_numbers(form: str, tmp_path: Path) -> None:
    shape = (3, 40, 96) if form == "mxfp4" else (40, 96)
    numbers = write(tmp_path, form, *shape)
    assert torch.equal(read(tmp_path, form, *shape), numbers)


@forms
def test_inputs_that_do_not_fill_their_words_are_refused(form: str, tmp_path: Path) -> None:
    shape = (3, 40, 100) if form == "mxfp4" else (40, 100)
    write(tmp_path, form, *shape[:-1], 96)
    with pytest.raises(ModelError, match="100 inputs are not a multiple of") as caught:
        read(tmp_path, form, *shape)
    assert NAME in caught.value.message


def without(suffix: str) -> Callable[[dict[str, Any]], object]:
    return lambda stored: stored.pop(next(name for name in stored if name.endswith(suffix)))


def with_nan(suffix: str) -> Callable[[dict[str, Any]], object]:
    def change(stored: dict[str, Any]) -> None:
        tensor = stored[f"{NAME}.{suffix}"]
        tensor.view(-1)[-1] = float("nan")

    return change


def negated(suffix: str) -> Callable[[dict[str, Any]], object]:
    def change(stored: dict[str, Any]) -> None:
        stored[f"{NAME}.{suffix}"].view(-1)[-1] *= -1

    return change


def cut(suffix: str) -> Callable[[dict[str, Any]], object]:
    def change(stored: dict[str, Any]) -> None:
        stored[f"{NAME}.{suffix}"] = stored[f"{NAME}.{suffix}"][:1].clone()

    return change


def put(suffix: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda stored: stored.__setitem__(f"{NAME}{suffix}", value)


@pytest.mark.parametrize(
    ("form", "change", "suffix", "expected"),
    [
        ("fp8 by block", without("_inv"), ".weight_scale_inv", "no safetensors file has"),
        ("fp8 by block", with_nan("weight_scale_inv"), ".weight_scale_inv", "not all scales are"),
        ("fp8 by block", cut("weight_scale_inv"), ".weight_scale_inv", "has shape [1, 3]"),
        ("fp8 by block", with_nan("weight"), ".weight", "not all numbers are finite"),
        ("fp8 by block", cut("weight"), ".weight", "has shape [1, 96]"),
        ("fp8 by row", cut("weight_scale"), ".weight_scale", "has shape [1, 1]"),
        ("fp8 by tensor", put(".weight_scale", torch.tensor(129.0)), ".weight_scale", "above 128"),
        ("awq", without("scales"), ".scales", "no safetensors file has"),
        ("awq", without("qweight"), ".qweight", "no safetensors file has"),
        ("awq", with_nan("scales"), ".scales", "not all scales are finite"),
        ("awq", cut("qzeros"), ".qzeros", "has shape [1, 5]"),
        ("awq", put(".qweight", torch.zeros(96, 5)), ".qweight", "has dtype torch.float32"),
        ("gptq", without("qzeros"), ".qzeros", "no safetensors file has"),
        ("gptq", put(".g_idx", torch.arange(96).int() % 3), ".g_idx", "act order"),
        ("packed", put(".weight_g_idx", torch.arange(96).int() % 3), ".weight_g_idx", "act order"),
        ("fp8 by block", negated("weight_scale_inv"), ".weight_scale_inv", "a scale is below 0"),
        ("awq", negated("scales"), ".scales", "a scale is below 0"),
        ("gptq", negated("scales"), ".scales", "a scale is below 0"),
        ("packed", negated("weight_scale"), ".weight_scale", "a scale is below 0"),
        (
            "packed",
            put(".weight_zero_point", torch.ones(40, 3, dtype=torch.int8)),
            ".weight_zero_point",
            "is not 0",
        ),
        (
            "packed",
            put(".weight_zero_point", torch.zeros(5, 3)),
            ".weight_zero_point",
            "has dtype torch.float32",
        ),
        ("packed with zeros", without("zero_point"), ".weight_zero_point", "no safetensors file"),
        ("mxfp4", without("scales"), "_scales", "no safetensors file has"),
        (
            "mxfp4",
            put("_scales", torch.full((3, 40, 3), 228, dtype=torch.uint8)),
            "_scales",
            "a scale is above 2^100",
        ),
    ],
)
def test_damage_is_refused_by_the_name_of_its_tensor(
    form: str,
    change: Callable[[dict[str, Any]], object],
    suffix: str,
    expected: str,
    tmp_path: Path,
) -> None:
    shape = (3, 40, 96) if form == "mxfp4" else (40, 96)
    write(tmp_path, form, *shape)
    stored = load_file(tmp_path / "model.safetensors")
    change(stored)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        read(tmp_path, form, *shape)
    # A scale has either of two names; without both, the first is missed.
    assert caught.value.param in (f"{NAME}{suffix}", f"{NAME}.weight_scale_inv")
    assert expected in caught.value.message and str(caught.value.param) in caught.value.message


@pytest.mark.parametrize("form", ["gptq", "packed"])
def test_an_order_that_the_files_leave_out_is_refused(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, form, 40, 96)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    save_file({name: each for name, each in stored.items() if "g_idx" not in name}, path)
    settings = copy.deepcopy(FORMS[form][0])
    if form == "gptq":
        settings["desc_act"] = True
    else:
        settings["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    monkeypatch.setitem(FORMS, form, (settings, FORMS[form][1]))
    with pytest.raises(ModelError, match=r"g_idx, although inputs are ordered by it"):
        read(tmp_path, form, 40, 96)


@pytest.mark.parametrize("zeros", ["packed", "int8"])
def test_zeros_beside_a_symmetric_form_are_read(zeros: str, tmp_path: Path) -> None:
    numbers = write(tmp_path, "packed", 40, 96)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    middle = torch.full((5, 3), -0x77777778, dtype=torch.int32)  # 0x88888888
    plain = torch.zeros(40, 3, dtype=torch.int8)
    stored[f"{NAME}.weight_zero_point"] = middle if zeros == "packed" else plain
    save_file(stored, path)
    assert torch.equal(read(tmp_path, "packed", 40, 96), numbers)
    if zeros == "packed":
        stored[f"{NAME}.weight_zero_point"] = middle + 1  # of the first of 8 outputs
        save_file(stored, path)
        changed = read(tmp_path, "packed", 40, 96)
        assert torch.equal(changed[1], numbers[1]) and not torch.equal(changed[0], numbers[0])
