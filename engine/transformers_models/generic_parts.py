"""Tandem's products and norms in a model of transformers, where modules compute the like."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from tandem.engine.decoder.kernel_set import Kernels
from tandem.engine.transformers_models.generic_attention import multiplies_groups, pack_experts
from tandem.kernels.reference.linear import Linear

logger = logging.getLogger(__name__)

MAX_INPUTS = 4  # that linear modules multiply between two that multiply the same


class Part(nn.Module):
    """A module without hooks: a call is its `forward`, except for a tracer."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        call = super().__call__ if isinstance(x, fx.Proxy) else self.forward
        return call(x)  # type: ignore[no-any-return]


class _Products:
    """Products of one input by several matrices, computed as one."""

    def __init__(self, linears: Sequence[nn.Linear], kernels: Kernels) -> None:
        weights = [linear.weight.data for linear in linears]
        self._product: Linear = kernels.pack_linear(
            weights[0] if len(weights) == 1 else torch.cat(weights)
        )
        self.sizes = [len(weight) for weight in weights]
        self.shapes, self.dtype = [weight.shape for weight in weights], weights[0].dtype
        self._input: torch.Tensor | None = None
        self._left: dict[int, torch.Tensor] = {}

    def all(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the products of `rows` [num_tokens, in] by all matrices, side by side."""
        return self._product(rows)

    def take(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return the product of `x` [..., in] by matrix `index`; keep those that are not taken."""
        if self._input is not x or index not in self._left:
            rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
            y = self._product(rows)
            if len(self.sizes) == 1:
                return y.view(*x.shape[:-1], self.sizes[0])
            parts = y.view(*x.shape[:-1], sum(self.sizes)).split_with_sizes(self.sizes, -1)
            self._input, self._left = x, dict(enumerate(parts))
        part = self._left.pop(index)
        if not self._left:
            self._input = None
        return part


class PackedLinear(Part):
    def __init__(self, products: _Products, index: int, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.products, self.index = products, index
        self.bias = bias
        self.out_features = products.sizes[index]
        # For code that looks at its dtype or shape: the numbers are packed.
        self.weight = torch.empty(products.shapes[index], dtype=products.dtype, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.products.take(self.index, x)
        return y if self.bias is None else y.add_(self.bias)


class _GatedMlp(Part):
    """down(act(gate(x)) * up(x)), the activation times the ups by a kernel."""

    def __init__(self, gate_up: _Products, down: _Products, act_mul: Callable[..., None]) -> None:
        super().__init__()
        self._gate_up, self._down, self._act_mul = gate_up, down, act_mul

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self._gate_up.all(x.reshape(-1, x.shape[-1]))
        inner = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._act_mul(gate_up, inner)
        return self._down.all(inner).view(x.shape)


class Norm(Part):
    def __init__(self, weight: torch.Tensor, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps
        self._rms_norm = kernels.rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty_like(rows)
        self._rms_norm(rows, self.weight, self.eps, out)
        return out.view(x.shape)


class Siblings:
    """The linear modules of a model that multiply the same tensor, found in a pass."""

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[nn.Module, str] = {
            module: name for name, module in model.named_modules() if type(module) is nn.Linear
        }
        self._num_calls: dict[str, int] = {}
        self._inputs: list[tuple[torch.Tensor, int, list[str]]] = []  # with a tensor's version
        self._hooks = [module.register_forward_pre_hook(self._note) for module in self._names]

    def close(self) -> list[tuple[str, ...]]:
        """Stop looking; return the names of those that are called once, by their common input."""
        for hook in self._hooks:
            hook.remove()
        groups = (
            tuple(name for name in names if self._num_calls[name] == 1)
            for _, _, names in self._inputs
        )
        return [names for names in groups if len(names) > 1]

    def _note(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        name = self._names[module]
        self._num_calls[name] = self._num_calls.get(name, 0) + 1
        if not arguments:
            return
        x = arguments[0]
        for each, version, names in self._inputs[-MAX_INPUTS:]:
            if each is x and version == x._version:
                names.append(name)
                return
        self._inputs.append((x, x._version, [name]))


def pack_linears(model: nn.Module, siblings: Sequence[tuple[str, ...]], kernels: Kernels) -> None:
    """Replace each nn.Linear by a product of `kernels`, one product for those of a group."""
    found = {name: each for name, each in model.named_modules() if type(each) is nn.Linear}
    groups = [names for names in siblings if _are_alike([found[name] for name in names])]
    grouped = {name for names in groups for name in names}
    for names in (*groups, *((name,) for name in found if name not in grouped)):
        linears = [found[name] for name in names]
        products = _Products(linears, kernels)
        for index, (name, linear) in enumerate(zip(names, linears, strict=True)):
            dtype = kernels.activation_dtype(linear.weight)
            bias = None if linear.bias is None else linear.bias.to(dtype)
            model.set_submodule(name, PackedLinear(products, index, bias))


def _are_alike(linears: Sequence[nn.Linear]) -> bool:
    """Return whether the matrices have one dtype."""
    return len({linear.weight.dtype for linear in linears}) == 1


def swap_mlps(model: nn.Module, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
    """Replace each module that computes a gated MLP of three matrices by the kernels."""
    for name, module in list(model.named_modules()):
        parts = list(module.children())
        linears = [each for each in parts if isinstance(each, PackedLinear) and each.bias is None]
        products = list(dict.fromkeys(each.products for each in linears))
        if len(parts) != 4 or len(linears) != 3 or [len(each.sizes) for each in products] != [2, 1]:
            continue
        (act,) = (each for each in parts if each not in linears)
        act_mul = _act_mul(act, kernels)
        if act_mul is not None and len(set(products[0].sizes)) == 1:
            mine = _GatedMlp(products[0], products[1], act_mul)
            if _is_same(mine, module, products[1].sizes[0], dtype, device):
                model.set_submodule(name, mine)


def _act_mul(act: nn.Module, kernels: Kernels) -> Callable[..., None] | None:
    """Return the kernel whose activation `act` is, if there is one."""
    x = torch.linspace(-8, 8, 1001)
    for mine, act_mul in (
        (F.silu(x), kernels.silu_mul),
        (F.gelu(x, approximate="tanh"), kernels.gelu_mul),
    ):
        if torch.allclose(act(x), mine, rtol=1e-6, atol=1e-6):
            return act_mul
    return None


def swap_experts(
    model: nn.Module, kernels: Kernels, dtype: torch.dtype, device: torch.device
) -> None:
    """Let kernels compute experts on a GPU on which torch would look at their counts."""
    if device.type != "cuda" or multiplies_groups(device, dtype):
        return
    for name, module in model.named_modules():
        if hasattr(module, "_apply_gate") and not pack_experts(module, kernels):
            logger.warning("%s: no kernel computes these experts; no graph can hold them", name)


def swap_norms(model: nn.Module, kernels: Kernels, dtype: torch.dtype) -> None:
    """Replace each norm that computes an RMSNorm, with w or 1 + w, by the kernel."""
    for name, module in list(model.named_modules()):
        weight = getattr(module, "weight", None)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or not isinstance(eps, float):
            continue
        for scale in (weight.data.to(dtype), (1 + weight.data.float()).to(dtype)):
            mine = Norm(scale, eps, kernels)
            if _is_same(mine, module, len(weight), dtype, weight.device):
                model.set_submodule(name, mine)
                break


def keep_frequencies(model: nn.Module, device: torch.device) -> None:
    """Let rotations that compute their frequencies in every pass find them on the device."""
    for module in model.modules():
        if callable(compute := getattr(module, "rope_init_fn", None)):
            module.__dict__["rope_init_fn"] = _Frequencies(compute, device)


class _Frequencies:
    """A rotation's frequencies, computed once where it asks by its config alone: not by length."""

    def __init__(
        self, compute: Callable[..., tuple[torch.Tensor, float]], device: torch.device
    ) -> None:
        self._compute = compute
        self._device = device
        self._found: tuple[torch.Tensor, float] | None = None

    def __call__(self, *arguments: Any, **named: Any) -> tuple[torch.Tensor, float]:
        if named or len(arguments) != 1:
            return self._compute(*arguments, **named)
        if self._found is None:
            frequencies, scaling = self._compute(*arguments)
            self._found = frequencies.to(self._device), scaling
        return self._found


def _is_same(
    mine: nn.Module, module: nn.Module, size: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether two modules map two vectors of `size` numbers alike."""
    x = torch.linspace(-2, 3, 2 * size, device=device, dtype=dtype).view(2, size)
    bound = 16 * torch.finfo(dtype).eps
    return torch.allclose(mine(x), module(x), rtol=bound, atol=bound)
