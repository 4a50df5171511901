"""A model multiplies FP8 by FP8 where its files are meant so, the option is on, and kernels can."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from tests.engine.weights.quantizers import FORMS, quantize_model
from tests.kernels.test_fused_layers import is_fused, make
from tests.kernels.test_runner_with_kernels import answer, make_runner

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="launches are watched where interpreted"
)
DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


@contextmanager
def matrices_of_products() -> Iterator[set[torch.dtype]]:
    """Yield the dtypes of the matrices that the body multiplies by."""
    run, found = InterpretedFunction.run, set[torch.dtype]()

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__name__ in ("linear_kernel", "qkv_kernel"):
            found.add(args[3].dtype)
        return run(self, *args, **kwargs)

    InterpretedFunction.run = recorded
    try:
        yield found
    finally:
        InterpretedFunction.run = run


def quantized(folder: Path, inputs: dict[str, Any] | None) -> Path:
    make(folder / "numbers", "qwen3")
    config, quantize = FORMS["fp8 by row"]
    group = config["config_groups"]["group_0"] | {"input_activations": inputs}
    config = config | {"config_groups": {"group_0": group}}
    quantize_model(folder / "numbers", folder / "codes", config, quantize)
    return folder / "codes"


@pytest.mark.slow
@pytest.mark.parametrize("option", ["plain", "deterministic"])
def test_a_model_rounds_inputs_where_its_files_say_so_and_the_option_is_on(
    option: str, tmp_path: Path
) -> None:
    folder, options = quantized(tmp_path, DYNAMIC), {"deterministic": option == "deterministic"}
    plain = make_runner(folder, "triton", **options)
    rounding = make_runner(folder, "triton", float8_products=True, **options)
    # A worker that rounds computes other keys and values.
    assert rounding.model_config.kv_form != plain.model_config.kv_form
    found = {}
    for runner in (plain, rounding):
        with matrices_of_products() as dtypes:
            assert len(answer(runner)[0]) == 3
        assert runner.model_config.quantization is not None
        found[runner.model_config.quantization.rounds_inputs] = dtypes - {torch.float32}
    assert found == {False: {torch.uint8}, True: {torch.float8_e4m3fn}}


@pytest.mark.parametrize("option", ["deterministic", "fused_products"])
def test_rounding_layers_are_fused_for_any_number_of_tokens_or_none(
    option: str, tmp_path: Path
) -> None:
    """The numbers that are rounded behind a norm of its own are not quite the same."""
    folder, options = quantized(tmp_path, DYNAMIC), {option: True}
    assert is_fused(make_runner(folder, "triton", **options))
    rounding = make_runner(folder, "triton", float8_products=True, **options)
    assert is_fused(rounding) == (option == "deterministic")


@pytest.mark.parametrize("inputs", [None, DYNAMIC | {"dynamic": False}, DYNAMIC | {"type": "int"}])
def test_weights_that_are_meant_alone_stay_alone(
    inputs: dict[str, Any] | None, tmp_path: Path
) -> None:
    folder = quantized(tmp_path, inputs)
    runner = make_runner(folder, "triton", float8_products=True)
    assert runner.model_config == make_runner(folder, "triton").model_config
    assert runner.model_config.quantization is not None
    assert not runner.model_config.quantization.rounds_inputs


@pytest.mark.parametrize("kernels", ["torch", "c"])
def test_kernels_of_a_cpu_round_no_inputs(kernels: str, tmp_path: Path) -> None:
    folder = quantized(tmp_path, DYNAMIC)
    runner = make_runner(folder, kernels, float8_products=True)
    assert runner.model_config == make_runner(folder, kernels).model_config
    assert answer(runner) == answer(make_runner(folder, kernels))
