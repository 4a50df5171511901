"""Mixtures of experts against float64: the choice, the products, and one result in any batch."""

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from tandem.kernels.cpu import experts as in_c
from tandem.kernels.cpu.linear import is_for_c
from tandem.kernels.experts import launch
from tandem.kernels.reference import experts as reference
from tandem.kernels.reference.experts import ExpertWeights
from tandem.kernels.reference.routing import Routing
from tests.kernels.tolerance import DTYPES, UNIT, launchers, on_cpu

kinds = launchers("kernels", launch, reference, in_c)

ROUTINGS = {
    "softmax": Routing(3, is_renormalized=False),
    "renormalized": Routing(3),
    "all": Routing(12),
    "one": Routing(1),
    "sigmoid": Routing(5, is_sigmoid=True, is_renormalized=False, scale=0.3),
    "groups": Routing(4, is_sigmoid=True, scale=2.5, num_groups=4, num_open_groups=2),
    "groups of one": Routing(3, is_sigmoid=True, num_groups=12, num_open_groups=3),
}
NUM_EXPERTS = 12


def choose(
    kernels: ModuleType, logits: torch.Tensor, correction: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = len(logits), routing.num_chosen
    expert_ids = torch.full(shape, -1, dtype=torch.int32, device=logits.device)
    weights = torch.full(shape, float("nan"), device=logits.device)
    kernels.route(logits, correction, routing, expert_ids, weights)
    return expert_ids, weights


def expected_choice(
    logits: list[float], correction: list[float], routing: Routing
) -> dict[int, float]:
    """Return the chosen experts, best first, with their weights."""
    x = torch.tensor(logits, dtype=torch.float64)
    scores = (x.sigmoid() if routing.is_sigmoid else x.softmax(0)).tolist()
    ranked = [score + more for score, more in zip(scores, correction, strict=True)]
    size = len(logits) // routing.num_groups
    groups = [range(start, start + size) for start in range(0, len(logits), size)]
    groups.sort(key=lambda group: -sum(sorted((ranked[i] for i in group), reverse=True)[:2]))
    allowed = sorted(i for group in groups[: routing.num_open_groups] for i in group)
    chosen = sorted(allowed, key=lambda i: -ranked[i])[: routing.num_chosen]
    total = sum(scores[i] for i in chosen) if routing.is_renormalized else 1.0
    return {i: routing.scale * scores[i] / total for i in chosen}


@kinds
@pytest.mark.parametrize("name", ROUTINGS)
def test_tokens_choose_the_best_experts(kernels: ModuleType, name: str, device: str) -> None:
    routing = ROUTINGS[name]
    generator = torch.Generator().manual_seed(7)
    wide = 3 * torch.randn(4, NUM_EXPERTS + 5, generator=generator)
    logits = wide.to(DTYPES[-1]).to(device)[:, 2 : NUM_EXPERTS + 2]
    correction = torch.randn(NUM_EXPERTS, generator=generator).to(device)
    its_correction = correction if routing.is_sigmoid else None
    expert_ids, weights = choose(kernels, logits, its_correction, routing)
    for token in range(4):
        added = correction.tolist() if routing.is_sigmoid else [0.0] * NUM_EXPERTS
        expected = expected_choice(logits[token].tolist(), added, routing)
        assert expert_ids[token].tolist() == list(expected)
        assert weights[token].tolist() == pytest.approx(list(expected.values()), rel=1e-5)


@kinds
@pytest.mark.parametrize("name", ["softmax", "groups"])
def test_no_tokens_choose_nothing(kernels: ModuleType, name: str, device: str) -> None:
    expert_ids, weights = choose(
        kernels, torch.empty(0, NUM_EXPERTS, device=device), None, ROUTINGS[name]
    )
    assert expert_ids.shape == weights.shape == (0, ROUTINGS[name].num_chosen)


@kinds
def test_the_first_of_equal_experts_is_chosen(kernels: ModuleType, device: str) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 1.0]], device=device)
    expert_ids, weights = choose(kernels, logits, None, Routing(4))
    assert expert_ids.tolist() == [[1, 2, 4, 0]]
    assert weights[0, :3].unique().numel() == 1


@kinds
def test_logits_far_apart_still_have_an_order(kernels: ModuleType, device: str) -> None:
    """Although the softmax of all but the first is 0."""
    logits = torch.tensor([[-900.0, 500.0, -500.0, -700.0]], device=device)
    expert_ids, weights = choose(kernels, logits, None, Routing(3))
    assert expert_ids.tolist() == [[1, 2, 3]] and weights.tolist() == [[1.0, 0.0, 0.0]]


def make_experts(
    num_experts: int,
    width: int,
    hidden_size: int,
    dtype: torch.dtype,
    device: str,
    *,
    is_clamped: bool = False,
) -> ExpertWeights:
    generator = torch.Generator().manual_seed(width)

    def randn(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        return values.to(dtype).to(device)

    gate_up = randn(num_experts, 2 * width, hidden_size)
    down = randn(num_experts, hidden_size, width)
    if not is_clamped:
        return ExpertWeights(gate_up, down)
    biases = randn(num_experts, 2 * width), randn(num_experts, hidden_size)
    return ExpertWeights(gate_up, down, *biases, alpha=1.702, limit=0.6)


def make_tokens(num_tokens: int, hidden_size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random tokens within wider rows."""
    wide = torch.randn(num_tokens, hidden_size + 4, generator=torch.Generator().manual_seed(3))
    return wide.to(dtype).to(device)[:, 2 : hidden_size + 2]


def expected_results(
    x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    gate_up, down = experts.gate_up.double(), experts.down.double()
    for token, choices in enumerate(expert_ids.tolist()):
        for rank, expert in enumerate(choices):
            hidden = gate_up[expert] @ x[token].double()
            if experts.gate_up_bias is not None:
                hidden += experts.gate_up_bias[expert]
            gate, up = hidden.chunk(2)
            if experts.limit:
                gate = gate.clamp(max=experts.limit)
                up = up.clamp(-experts.limit, experts.limit) + 1
                opened = gate * (gate * experts.alpha).sigmoid() * up
            else:
                opened = F.silu(gate) * up
            result = down[expert] @ opened
            if experts.down_bias is not None:
                result += experts.down_bias[expert]
            out[token] += weights[token, rank].double() * result
    return out


def check(
    kernels: ModuleType, x: torch.Tensor, expert_ids: torch.Tensor, experts: ExpertWeights
) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(expert_ids.shape, generator=generator).to(x.device)
    out = kernels.pack_experts(experts)(x, expert_ids, weights)
    assert out.shape == x.shape and out.dtype == x.dtype
    expected = expected_results(x, expert_ids, weights, experts)
    # Gates and ups are rounded once, their product once more, then the result.
    magnitude = max(1.0, float(expected.abs().amax())) if expected.numel() else 1.0
    atol = magnitude * (8 * UNIT[x.dtype] + 256 * UNIT[torch.float32])
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)


# On a CPU float16 is multiplied by libraries, with activations of float32.
KINDS = [
    *(pytest.param(launch, dtype, id=f"triton-{dtype}") for dtype in DTYPES),
    pytest.param(reference, torch.float32, id="torch"),
    pytest.param(in_c, torch.float32, id="c", marks=on_cpu),
]


@pytest.mark.parametrize(("kernels", "dtype"), KINDS)
@pytest.mark.parametrize(
    ("num_experts", "width", "hidden_size", "num_tokens", "is_clamped"),
    [
        (1, 16, 32, 3, False),
        (5, 70, 98, 0, True),
        (5, 70, 98, 1, True),
        (7, 33, 130, 6, False),
        (7, 33, 130, 6, True),
    ],
)
def test_results_are_the_weighted_sum_of_the_chosen_experts(
    kernels: ModuleType,
    dtype: torch.dtype,
    num_experts: int,
    width: int,
    hidden_size: int,
    num_tokens: int,
    is_clamped: bool,
    device: str,
) -> None:
    experts = make_experts(num_experts, width, hidden_size, dtype, device, is_clamped=is_clamped)
    x = make_tokens(num_tokens, hidden_size, dtype, device)
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(5))
    expert_ids = scores.argsort(1)[:, : min(3, num_experts)].int().contiguous().to(device)
    check(kernels, x, expert_ids, experts)


@kinds
@pytest.mark.parametrize("num_tokens", [1, 70])
def test_all_tokens_may_choose_one_expert(
    kernels: ModuleType, num_tokens: int, device: str
) -> None:
    experts = make_experts(6, 40, 64, torch.float32, device)
    x = make_tokens(num_tokens, 64, torch.float32, device)
    expert_ids = torch.full((num_tokens, 1), 4, dtype=torch.int32, device=device)
    check(kernels, x, expert_ids, experts)


@pytest.mark.parametrize(
    "kernels", [pytest.param(launch, id="triton"), pytest.param(in_c, id="c", marks=on_cpu)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_has_the_same_result_in_every_batch(
    kernels: ModuleType, dtype: torch.dtype, device: str
) -> None:
    """To the last bit, alone and beside more tokens than one call or one tile takes."""
    experts = make_experts(5, 70, 98, dtype, device, is_clamped=True)
    is_interpreted = kernels is launch and device == "cpu"
    if (kernels is in_c and not is_for_c(experts.down[0])) or (
        is_interpreted and dtype.itemsize == 2
    ):
        pytest.skip("bfloat16 is not multiplied here")
    num_tokens = 24 if is_interpreted else 1200
    x = make_tokens(num_tokens, 98, dtype, device)
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(num_tokens, 5, generator=generator).to(device)
    expert_ids, weights = choose(kernels, logits, None, Routing(2))
    compute = kernels.pack_experts(experts)
    together = compute(x, expert_ids, weights)
    for first, end in ((0, 1), (3, num_tokens // 2)):
        part = slice(first, end)
        alone = compute(x[part], expert_ids[part], weights[part])
        assert torch.equal(alone, together[part])
