"""A product in segments has the same bits whoever holds which of them."""

import pytest
import torch

from tandem.kernels.cpu.linear import is_for_c
from tandem.kernels.cpu.segments import SegmentedLinear
from tandem.kernels.reference.quantized import BITS, Code, QuantizedMatrix, expanded
from tandem.kernels.reference.segments import Segments
from tests.kernels.tolerance import UNIT, on_cpu

pytestmark = on_cpu

# (out, in): segments of equal and of unequal lengths, below and above a panel.
SHAPES = [(24, 64), (65, 76), (192, 512), (130, 9728)]


def weights(out_size: int, in_size: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    weight = torch.randn(out_size, in_size).mul_(in_size**-0.5).to(dtype)
    if not is_for_c(weight):
        pytest.skip(f"this processor multiplies {dtype} elsewhere")
    return weight


def added(parts: list[torch.Tensor]) -> torch.Tensor:
    """Add pairwise, neighbors first."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_widths_have_the_bits_of_one_process(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = weights(*shape, dtype)
    in_size = shape[1]
    for num_tokens in (0, 1, 7, 97, 200):
        x = torch.randn(num_tokens, in_size).to(dtype)
        whole = SegmentedLinear(weight, Segments(in_size, 8, 0, 8))(x)
        for num_ranks in (2, 4, 8):
            parts = []
            for rank in range(num_ranks):
                count = 8 // num_ranks
                mine = Segments(in_size, 8, rank * count, count)
                columns = slice(mine.inputs.start, mine.inputs.stop)
                product = SegmentedLinear(weight[:, columns], mine, torch.float32)
                parts.append(product(x[:, columns]))
            assert torch.equal(added(parts).to(dtype), whole)


@pytest.mark.parametrize("code", ["float8", "int4"])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_all_widths_of_a_matrix_of_codes_have_the_bits_of_one_process(
    code: Code, has_zeros: bool
) -> None:
    """Cut at the borders of 76 groups: of 9 or 10 in a segment."""
    torch.manual_seed(0)
    in_size, unit = 76 * 32, 32
    codes = torch.randint(0, 100, (130, in_size * BITS[code] // 8), dtype=torch.uint8)
    scales = torch.rand(130, 76)
    zeros = torch.randint(-8, 8, (130, 76)).float() if has_zeros and code == "int4" else None
    weight = QuantizedMatrix(code, codes, scales, unit, zeros)

    scale = expanded(weight).norm(dim=1).max()  # of a result

    def part(inputs: range) -> QuantizedMatrix:
        """The matrix's share of a rank, which begins with a group."""
        width = BITS[code]
        return QuantizedMatrix(
            code,
            codes[:, inputs.start * width // 8 : inputs.stop * width // 8],
            scales[:, inputs.start // unit : inputs.stop // unit],
            unit,
            None if zeros is None else zeros[:, inputs.start // unit : inputs.stop // unit],
        )

    for num_tokens in (0, 1, 5, 97, 200):  # few are multiplied by codes, more by their numbers
        x = torch.randn(num_tokens, in_size)
        whole = SegmentedLinear(weight, Segments(in_size, 8, 0, 8, unit))(x)
        exact = x.double() @ expanded(weight).double().T
        assert torch.allclose(whole.double(), exact, rtol=1e-5, atol=1e-5 * float(scale))
        for num_ranks in (2, 8):
            count = 8 // num_ranks
            mine = [Segments(in_size, 8, rank * count, count, unit) for rank in range(num_ranks)]
            parts = [
                SegmentedLinear(part(each.inputs), each)(x[:, each.inputs.start : each.inputs.stop])
                for each in mine
            ]
            assert torch.equal(added(parts), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_segments", [1, 2, 8])
def test_segments_add_up_to_the_product(num_segments: int, dtype: torch.dtype) -> None:
    weight = weights(130, 512, dtype)
    x = torch.randn(9, 512).to(dtype)
    result = SegmentedLinear(weight, Segments(512, num_segments, 0, num_segments))(x)
    exact = x.double() @ weight.double().T
    assert result.dtype == dtype
    assert (result.double() - exact).abs().max() < 8 * (UNIT[dtype] + 64 * UNIT[torch.float32])


def test_a_row_has_the_same_bits_in_every_batch_and_by_any_threads() -> None:
    weight = weights(130, 512, torch.float32)
    product = SegmentedLinear(weight, Segments(512, 8, 0, 8))
    x, before = torch.randn(200, 512), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = product(x)
    finally:
        torch.set_num_threads(before)
    for row in (0, 5, 96, 199):
        assert torch.equal(product(x[row : row + 1])[0], together[row])


def test_segments_cover_all_inputs_and_part_no_pair() -> None:
    for in_size in (16, 76, 9728, 512):
        starts = [Segments(in_size, 8, i, 1).inputs for i in range(8)]
        assert [each.start for each in starts[1:]] == [each.stop for each in starts[:-1]]
        assert starts[0].start == 0 and starts[-1].stop == in_size
        assert all(len(each) >= 2 and each.start % 2 == 0 for each in starts)
