"""The rates of the plainest programs on the chip: the ceilings of the other figures."""

from collections.abc import Callable, Iterator, Sequence

import torch
import triton
import triton.language as tl

from tandem.bench.kernels.cases import Call, Case, measure_groups, mismatch, relative_error
from tandem.bench.report.figures import Figure
from tandem.bench.report.setting import Setting

MATRIX_SIZE, NUM_MATRICES = 8192, 3
BUFFER_BYTES = 4 << 30


def run(setting: Setting) -> Iterator[Figure]:
    """Measure each rate by several figures, named after it; the best of each counts."""
    yield from measure_groups({"matmul": matmul, "copy and read": copy_and_read}, setting)


def matmul(setting: Setting) -> Sequence[Case]:
    """Return a square matrix product of the library's."""
    size = setting.size(MATRIX_SIZE, 64)
    a, b, out = (setting.randn(NUM_MATRICES, size, size) for _ in range(3))
    rows = torch.randint(size, (64,), device=setting.device)

    def check(run: Call) -> float:
        out[0].fill_(float("nan"))
        run()
        return relative_error(out[0][rows], a[0][rows].double() @ b[0].double())

    return [
        Case(
            name="matmul_torch",
            label=f"matmul {size}^3, torch",
            unit="TFLOP/s",
            work=2.0 * size**3,
            rate="matmul",
            launch=lambda index, _: torch.matmul(a[index], b[index], out=out[index]),
            num_sets=NUM_MATRICES,
            check=check,
            error_bound=1e-2,
        )
    ]


def copy_and_read(setting: Setting) -> Sequence[Case]:
    """Return torch's copy, counted read and written, and reductions that only read."""
    num_bytes = setting.size(BUFFER_BYTES, 1 << 13)
    source = torch.randn(num_bytes // 4, device=setting.device)
    target = torch.empty_like(source)

    def check_amax(_run: Call) -> float:
        parts = (float(part.max()) for part in source.view(16, -1))
        return abs(float(torch.amax(source)) - max(parts))

    cases = [
        _copy(source, target, "torch", "torch", lambda: target.copy_(source)),
        Case(
            name="read_torch",
            label="read, torch.amax",
            unit="TB/s",
            work=float(num_bytes),
            launch=lambda *_: torch.amax(source),
            check=check_amax,
        ),
    ]
    for tile in (256,) if setting.is_dry else (4096, 8192, 16384):
        cases.append(_own_read(source, tile))
        cases.append(_own_copy(source, target, tile))
    return cases


def _own_read(source: torch.Tensor, tile: int) -> Case:
    words = source.view(torch.int32)
    num_programs = triton.cdiv(len(words), tile)
    folded = torch.empty(num_programs, dtype=torch.int32, device=source.device)

    def launch(_index: int, _config: None) -> None:
        _fold_kernel[(num_programs,)](words, folded, len(words), TILE=tile, num_warps=8)

    def check(run: Call) -> float:
        folded.fill_(-1)
        run()
        tiles = torch.nn.functional.pad(words, (0, num_programs * tile - len(words)))
        tiles = tiles.view(num_programs, tile)
        while tiles.shape[1] > 1:
            tiles = tiles[:, : tiles.shape[1] // 2] ^ tiles[:, tiles.shape[1] // 2 :]
        return mismatch(folded, tiles[:, 0])

    return Case(
        name=f"read_triton_{tile}",
        label=f"read, Triton, {tile} words a program",
        unit="TB/s",
        work=float(source.nbytes),
        launch=launch,
        check=check,
    )


def _own_copy(source: torch.Tensor, target: torch.Tensor, tile: int) -> Case:
    grid = (triton.cdiv(len(source), tile),)

    def launch() -> None:
        _copy_kernel[grid](source, target, len(source), TILE=tile, num_warps=8)

    label = f"Triton, {tile} words a program"
    return _copy(source, target, f"triton_{tile}", label, launch)


def _copy(
    source: torch.Tensor, target: torch.Tensor, name: str, label: str, copy: Callable[[], object]
) -> Case:
    """Return a copy, counted read and written."""

    def check(run: Call) -> float:
        target.fill_(float("nan"))
        run()
        return mismatch(target, source)

    return Case(
        name=f"copy_{name}",
        label=f"copy, read and written, {label}",
        unit="TB/s",
        work=2.0 * source.nbytes,
        rate="copy",
        launch=lambda *_: copy(),
        check=check,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _fold_kernel(  # type: ignore[no-untyped-def]
    words,  # [num_words]
    folded,  # [num_programs]
    num_words,
    TILE: tl.constexpr,
):
    # grid: (num_programs,)
    my_words = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tile = tl.load(words + my_words, mask=my_words < num_words, other=0)
    tl.store(folded + tl.program_id(0), tl.xor_sum(tile))


@triton.jit  # type: ignore[untyped-decorator]
def _copy_kernel(  # type: ignore[no-untyped-def]
    source,  # [num_words]
    target,  # [num_words]
    num_words,
    TILE: tl.constexpr,
):
    # grid: (ceil(num_words / TILE),)
    my_words = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = my_words < num_words
    tl.store(target + my_words, tl.load(source + my_words, mask=mask), mask=mask)
