"""Products of a long prompt by every form of weights, beside cuBLAS's of the numbers."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tandem.bench.kernels.cases import ERROR_BOUNDS, Call, Case, measure_groups, relative_error
from tandem.bench.report.figures import Figure
from tandem.bench.report.setting import Setting
from tandem.kernels.experts.launch import pack_experts
from tandem.kernels.linear.launch import pack_linear, pack_linear_in_order
from tandem.kernels.reference import experts as reference
from tandem.kernels.reference.experts import ExpertWeights
from tandem.kernels.reference.quantized import BITS, Code, Matrix, QuantizedMatrix, expanded

NUM_TOKENS, TINY_NUM_TOKENS = 8192, 130
# [rows, inputs] of an 8-billion-parameter model: many rows, and inputs that are cut into splits
MATRICES, TINY_MATRIX = {"gate_up": (24576, 4096), "down": (4096, 12288)}, (64, 128)
# (experts, chosen, hidden size, width), those of Qwen3-30B-A3B
EXPERTS, TINY_EXPERTS = (128, 8, 2048, 768), (2, 1, 64, 64)
GROUP_SIZE = 64  # inputs of a row that share a scale
# Codes, and True where there are zeros beside the scales; None: numbers.
FORMS: dict[str, tuple[Code, bool] | None] = {
    "in_order": None,
    "float8": ("float8", False),
    "int4": ("int4", False),
    "int4_zeros": ("int4", True),
}
EXPERT_FORMS = ("in_order", "float8", "int4_zeros")
NUM_CHECKED = 64  # tokens at the end of the prompt
OTHER_BITS = 2.0  # the error where they have other bits without the others

Product = Callable[..., torch.Tensor]


def run(setting: Setting) -> Iterator[Figure]:
    """Measure matrices alone, then experts beside as many operations of cuBLAS."""
    names = ("down",) if setting.is_dry else MATRICES  # which are one in a dry run
    groups = {f"prompt {name}": partial(_matrix_cases, name=name) for name in names}
    yield from measure_groups({**groups, "prompt experts": _expert_cases}, setting)


def _matrix_cases(setting: Setting, *, name: str) -> Sequence[Case]:
    rows, in_size = TINY_MATRIX if setting.is_dry else MATRICES[name]
    x = setting.randn(setting.size(NUM_TOKENS, TINY_NUM_TOKENS), in_size)
    label, work = f"{len(x)} tokens by {rows} x {in_size}", 2.0 * len(x) * rows * in_size
    cublas = partial(F.linear, weight=setting.randn(rows, in_size))
    cases = [_case(setting, name, "cublas", label, work, cublas, (x,))]
    for form in FORMS:
        weight = _matrix(setting, form, rows, in_size)
        expected = x[-NUM_CHECKED:].float() @ expanded(weight).float().T
        product = pack_linear_in_order(weight)
        cases.append(_case(setting, name, form, label, work, product, (x,), expected))
        if isinstance(weight, QuantizedMatrix):
            way, product = f"{form}_expanded", pack_linear(weight)
            cases.append(_case(setting, name, way, label, work, product, (x,), expected))
    return cases


def _expert_cases(setting: Setting) -> Sequence[Case]:
    num_experts, num_chosen, hidden, width = TINY_EXPERTS if setting.is_dry else EXPERTS
    x = setting.randn(setting.size(NUM_TOKENS, TINY_NUM_TOKENS), hidden)
    scores = torch.rand(len(x), num_experts, device=setting.device)
    shares, ids = scores.topk(num_chosen)
    inputs = (x, ids.int(), shares)
    label = f"{len(x)} tokens by {num_chosen} of {num_experts} experts of {hidden} x {width}"
    work = 6.0 * ids.numel() * hidden * width
    opening, closing = setting.randn(2 * width, hidden), setting.randn(hidden, width)
    many = x.repeat(num_chosen, 1)

    def cublas(*_: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(many, opening)[:, :width], closing)

    cases = [_case(setting, "experts", "cublas", label, work, cublas, inputs)]
    for form in EXPERT_FORMS:
        weights = ExpertWeights(
            _matrix(setting, form, num_experts, 2 * width, hidden),
            _matrix(setting, form, num_experts, hidden, width),
        )
        wide = ExpertWeights(expanded(weights.gate_up).float(), expanded(weights.down).float())
        last = (x[-NUM_CHECKED:].float(), *(each[-NUM_CHECKED:] for each in inputs[1:]))
        expected = reference.pack_experts(wide)(*last)
        product = pack_experts(weights)
        cases.append(_case(setting, "experts", form, label, work, product, inputs, expected))
    return cases


def _matrix(setting: Setting, form: str, *shape: int) -> Matrix:
    """Return random numbers, or codes, of a variance near 1 / the inputs."""
    *outer, in_size = shape
    stored = FORMS[form]
    if stored is None:
        return setting.randn(*shape).mul_(in_size**-0.5)
    code, has_zeros = stored
    size = (*outer, in_size * BITS[code] // 8)
    codes = torch.randint(256, size, dtype=torch.uint8, device=setting.device)
    if code == "float8":
        codes &= 0xB7  # magnitudes up to 1.875
    groups = (*outer, in_size // GROUP_SIZE)
    scales = torch.rand(groups, device=setting.device).add_(0.5).mul_(0.25 * in_size**-0.5)
    zeros = torch.randint(-4, 4, groups, device=setting.device).to(setting.dtype)
    stored_scales = scales.to(setting.dtype)
    return QuantizedMatrix(code, codes, stored_scales, GROUP_SIZE, zeros if has_zeros else None)


def _case(
    setting: Setting,
    name: str,
    form: str,
    label: str,
    work: float,
    product: Product,
    inputs: tuple[torch.Tensor, ...],
    expected: torch.Tensor | None = None,  # of the last tokens; None: a library's product
) -> Case:
    results: list[torch.Tensor] = []

    def launch(_index: int, _config: Any) -> None:
        results[:] = [product(*inputs)]

    def check(run: Call) -> float:
        run()
        if expected is None:
            return 0.0
        last = results[0][-NUM_CHECKED:]
        error = relative_error(last, expected)
        if setting.is_dry or form.endswith(
            "expanded"
        ):  # as for the interpreter and cuBLAS they may
            return error
        alone = product(*(each[-NUM_CHECKED:] for each in inputs))
        return error if torch.equal(last, alone) else OTHER_BITS

    return Case(
        name=f"prompt_{name}_{form}",
        label=f"{label}, {form.replace('_', ' ')}",
        unit="TFLOP/s",
        work=work,
        rate="matmul",
        launch=launch,
        check=check,
        error_bound=ERROR_BOUNDS[setting.dtype],
        is_ours=expected is not None,
    )
