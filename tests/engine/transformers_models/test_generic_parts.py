"""Modules of transformers replaced by Tandem's products: which of them, and to the same result."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tandem.engine.decoder.kernel_set import Kernels, load_kernels
from tandem.engine.transformers_models.generic_parts import Siblings, pack_linears, swap_mlps
from tests.accuracy import judged_results

SIZE = 32


class Mlp(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.up_proj = nn.Linear(SIZE, 48, bias=False)  # registered in another order than called
        self.gate_proj = nn.Linear(SIZE, 48, bias=False)
        self.down_proj = nn.Linear(48, SIZE, bias=False)
        self.act_fn = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y


class Block(nn.Module):
    """Two products of one tensor, a third after it was written to, and a gated MLP."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(SIZE, 8), nn.Linear(SIZE, 16)
        self.v = nn.Linear(SIZE, 24)
        self.mlp = Mlp(act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        k, q = self.k(x), self.q(x)
        x.mul_(2)
        v = self.v(x)
        y: torch.Tensor = self.mlp(torch.cat([q, k, v], dim=-1)[..., :SIZE].contiguous())
        return y


@pytest.fixture
def kernels() -> Kernels:
    return load_kernels("torch")


def packed(block: Block, kernels: Kernels) -> list[tuple[str, ...]]:
    siblings = Siblings(block)
    with torch.no_grad():
        block(torch.ones(1, 2, SIZE))
    names = siblings.close()
    block.requires_grad_(False)
    pack_linears(block, names, kernels)
    return names


def test_linears_of_the_same_numbers_are_one_product(kernels: Kernels) -> None:
    block, x = Block(nn.SiLU()), torch.randn(1, 5, SIZE)
    expected = judged_results(block, x)
    assert packed(block, kernels) == [("k", "q"), ("mlp.gate_proj", "mlp.up_proj")]
    expected.assert_near(block(x))
    expected.assert_near(block(x))


@pytest.mark.parametrize(
    ("act", "is_swapped"),
    [(nn.SiLU(), True), (nn.GELU(approximate="tanh"), True), (nn.GELU(), False)],
    ids=["silu", "gelu_tanh", "gelu"],
)
def test_a_gated_mlp_is_swapped_if_a_kernel_has_its_activation(
    act: Callable[[torch.Tensor], torch.Tensor], is_swapped: bool, kernels: Kernels
) -> None:
    assert isinstance(act, nn.Module)
    block, x = Block(act), torch.randn(1, 5, SIZE)
    expected = judged_results(block, x)
    packed(block, kernels)
    swap_mlps(block, kernels, torch.float32, torch.device("cpu"))
    assert (type(block.mlp) is not Mlp) is is_swapped
    expected.assert_near(block(x))


def test_an_mlp_whose_ups_are_activated_stays(kernels: Kernels) -> None:
    class Swapped(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gates = self.gate_proj(x)
            y: torch.Tensor = self.down_proj(gates * F.silu(self.up_proj(x)))
            return y

    block, x = Block(nn.SiLU()), torch.randn(1, 5, SIZE)
    block.mlp = Swapped(nn.SiLU())
    expected = judged_results(block, x)
    packed(block, kernels)
    swap_mlps(block, kernels, torch.float32, torch.device("cpu"))
    assert type(block.mlp) is Swapped
    expected.assert_near(block(x))
