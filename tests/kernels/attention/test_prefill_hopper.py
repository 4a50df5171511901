"""The Gluon prefill kernel, simulated, against dense attention in float64; and its build."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tandem.kernels.attention import prefill_hopper as hopper
from tandem.kernels.attention import prefill_hopper_kernel
from tandem.kernels.attention.prefill_hopper import PrefillHopperConfig
from tests.kernels.attention.gluon_simulator import SimulationError, simulated
from tests.kernels.tolerance import tolerance

SCALE = 0.27
KERNEL = "prefill_hopper_kernel"

Simulate = Callable[..., None]


@pytest.fixture
def simulate(make_paged: Any) -> Simulate:
    """simulate(query_lens, context_lens, ...): the kernel, its events in an order by `seed`."""

    def run(
        query_lens: list[int],
        context_lens: list[int],
        *,
        num_heads: int = 2,
        head_dim: int = 64,
        dtype: torch.dtype = torch.float16,
        num_kv_heads: int = 1,
        block_size: int = 16,
        config: PrefillHopperConfig | None = None,
        module: ModuleType = prefill_hopper_kernel,
        num_programs: int = 2,
        seed: int = 0,
    ) -> None:
        paged = make_paged(context_lens, num_kv_heads, head_dim, block_size, dtype)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hopper, KERNEL, simulated(module, KERNEL, seed))
            patch.setattr(hopper, "num_multiprocessors", lambda _device: num_programs)
            counter = torch.zeros(1, dtype=torch.int32)
            patch.setattr(hopper, "arrivals", lambda _device: counter)
            check(paged, query_lens, num_heads, torch.device("cpu"), config)
            assert not counter.any()

    return run


def check(
    paged: Any,
    query_lens: list[int],
    num_heads: int,
    device: torch.device,
    config: PrefillHopperConfig | None = None,
) -> None:
    dtype, head_dim = paged.kv_cache.dtype, paged.kv_cache.shape[-1]
    starts = [sum(query_lens[:row]) for row in range(len(query_lens) + 1)]
    fused = torch.randn(starts[-1], num_heads + 3, head_dim).to(device, dtype)
    q = fused[:, :num_heads]
    out = torch.full((starts[-1], num_heads, head_dim), float("nan"), dtype=dtype, device=device)
    longest = max(query_lens, default=0)
    hopper.prefill_attention_hopper(
        q,
        paged.kv_cache.to(device),
        paged.block_tables.to(device),
        torch.tensor(starts, device=device),
        paged.context_lens.to(device),
        longest,
        SCALE,
        out,
        config=config,
    )
    # Weights are rounded once, the result and what it is compared with once each.
    largest = max((values.abs().max().item() for values in paged.values), default=0.0)
    for row in range(len(query_lens)):
        mine = slice(starts[row], starts[row + 1])
        expected = paged.expect(q[mine].to(paged.kv_cache.device), row, SCALE).to(device)
        error = tolerance(dtype, 3, largest)
        torch.testing.assert_close(out[mine], expected, rtol=0, atol=error)


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.bfloat16), (128, torch.float16)])
def test_whole_prompts_of_odd_lengths_are_causal(
    simulate: Simulate, head_dim: int, dtype: torch.dtype
) -> None:
    lens = [300, 1, 64, 129, 77]
    simulate(lens, lens, head_dim=head_dim, dtype=dtype)


def test_a_later_chunk_sees_everything_before_it(simulate: Simulate) -> None:
    simulate([140, 32, 1, 2, 128], [500, 33, 400, 18, 384], seed=1)


@pytest.mark.parametrize("group_size", [1, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_every_group_of_query_heads_reads_its_own_kv_head(
    simulate: Simulate, group_size: int
) -> None:
    simulate([21, 13], [40, 21], num_heads=2 * group_size, num_kv_heads=2)


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (128, 64), (64, 128), (64, 256)])
def test_tiles_gather_blocks_of_every_offered_size(
    simulate: Simulate, head_dim: int, block_size: int
) -> None:
    simulate([150, 5], [411, 256], head_dim=head_dim, block_size=block_size, num_kv_heads=2)


@pytest.mark.parametrize(
    "num_programs", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 7))]
)
@pytest.mark.parametrize(("take_turns", "num_stages"), [(False, 2), (True, 2), (True, 3)])
def test_a_program_works_through_many_items_in_any_order_of_events(
    simulate: Simulate, num_programs: int, take_turns: bool, num_stages: int
) -> None:
    simulate(
        [290, 3, 0, 130],
        [290, 203, 9, 200],
        num_heads=3,
        config=PrefillHopperConfig(num_stages=num_stages, take_turns=take_turns),
        num_programs=num_programs,
        seed=num_programs,
    )


def test_an_empty_batch_is_nothing_to_do(simulate: Simulate) -> None:
    simulate([], [])


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype"),
    [
        (80, 16, torch.float16),
        (128, 24, torch.float16),
        (64, 8, torch.float16),
        (64, 192, torch.bfloat16),
        (128, 64, torch.float32),
    ],
)
def test_other_shapes_are_not_offered(head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    assert not hopper.offered(head_dim, block_size, dtype)


@pytest.fixture
def edited(tmp_path: Path) -> Callable[[str, str], ModuleType]:
    def edit(old: str, new: str) -> ModuleType:
        source = Path(str(prefill_hopper_kernel.__file__)).read_text()
        assert old in source
        path = tmp_path / "edited.py"
        path.write_text(source.replace(old, new))
        spec = importlib.util.spec_from_file_location("edited", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return edit


MISTAKES = {
    "scores from keys that have not landed": (
        "    mbarrier.wait(k_full.index(next_slot), (loads + 1) // STAGES & 1)\n",
        "",
    ),
    "values that have not landed": (
        "    mbarrier.wait(v_full.index(slot), phase)\n    acc = warpgroup_mma(",
        "    acc = warpgroup_mma(",
    ),
    "an item read before it is there": (
        "    mbarrier.wait(q_full.index(place), items // QUERY_STAGES & 1)\n",
        "",
    ),
    "queries that have not landed": ("TILE_ROWS * head_dim * 2)", "0)"),
    "queries of another item": ("my_q.index(2 * place + me)", "my_q.index(me)"),
    "an item over one in use": (
        "            mbarrier.wait(q_free.index(place), (items // QUERY_STAGES & 1) ^ 1)\n",
        "",
    ),
    "no word of the end": ("    mbarrier.arrive(q_full.index(place), count=1)\n", ""),
    "a counter that is not zero again": ("        gl.store(counter, 0)\n", "        pass\n"),
    "an item left out": ("gl.num_programs(0) + taken", "gl.num_programs(0) + taken + 1"),
    "values given back before they are read": (
        "    acc = warpgroup_mma_wait(0, deps=[acc])\n"
        "    mbarrier.arrive(free.index(next_slot), count=1)\n",
        "    mbarrier.arrive(free.index(next_slot), count=1)\n"
        "    acc = warpgroup_mma_wait(0, deps=[acc])\n",
    ),
    "keys given back before they are read": (
        "        scores = warpgroup_mma_wait(0, deps=[scores])\n"
        "        mbarrier.arrive(free.index(slot), count=1)\n",
        "        mbarrier.arrive(free.index(slot), count=1)\n"
        "        scores = warpgroup_mma_wait(0, deps=[scores])\n",
    ),
    "queries given back before they are read": (
        "        mbarrier.wait(k_full.index(slot), loads // STAGES & 1)\n",
        "        mbarrier.arrive(q_free.index(place), count=1)\n"
        "        mbarrier.wait(k_full.index(slot), loads // STAGES & 1)\n",
    ),
    "a product used too early": (
        "    acc = warpgroup_mma_wait(0, deps=[acc])\n    mbarrier",
        "    acc = warpgroup_mma_wait(1, deps=[acc])\n    mbarrier",
    ),
    "a wrong phase": ("(loads // STAGES & 1) ^ 1)", "loads // STAGES & 1)"),
    "loads over those in use": (
        "                mbarrier.wait(free.index(loads % STAGES), (loads // STAGES & 1) ^ 1)\n",
        "",
    ),
    "a phase that flips late": ("phase = loads // STAGES & 1", "phase = loads // 4 & 1"),
    "a load never given back": ("    mbarrier.arrive(free.index(next_slot), count=1)\n", ""),
    "queries never given back": ("        mbarrier.arrive(q_free.index(place), count=1)\n", ""),
    "a slot freed by one consumer alone": (
        "free = _barriers(STAGES, 1), _barriers(STAGES, 1), _barriers(STAGES, 2)",
        "free = _barriers(STAGES, 1), _barriers(STAGES, 1), _barriers(STAGES, 1)",
    ),
    "a turn not passed on": (
        "    mbarrier.wait(v_full.index(slot), phase)\n    acc = warpgroup_mma(",
        "    TURNS = False\n    mbarrier.wait(v_full.index(slot), phase)\n    acc = warpgroup_mma(",
    ),
    "more bytes than come": (
        "TILE_TOKENS * tile.shape[1] * 2)",
        "TILE_TOKENS * tile.shape[1] * 4)",
    ),
    "fewer bytes than come": ("TILE_TOKENS * tile.shape[1] * 2)", "TILE_TOKENS * tile.shape[1])"),
    "stores without a fence": ("                    fence_async_shared()\n", ""),
    "rows cleared before they land": (
        "                    mbarrier.wait(landed.index(0), clearings & 1)\n",
        "",
    ),
    "stale values not cleared": ("& (context % block_size != 0)", "& (context < 0)"),
    "the future seen": ("<= (position + rows)", "<= (1 + position + rows)"),
    "the mask a step late": ("(position + 1) // TILE_TOKENS", "1 + (position + 1) // TILE_TOKENS"),
    "blocks past the context": ("gl.where(inside, block", "gl.where(inside | True, block"),
    "an accumulator not rescaled": (
        "acc * gl.convert_layout(shrink, gl.SliceLayout(1, operand.parent))[:, None]",
        "acc * 1.0",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_noticed(
    simulate: Simulate, edited: Callable[[str, str], ModuleType], mistake: str
) -> None:
    module = edited(*MISTAKES[mistake])
    with pytest.raises((SimulationError, AssertionError)):
        for seed in range(4):
            lens = [140, 130, 40, 3], [400, 203, 40, 9]
            config = PrefillHopperConfig(num_stages=2 + seed % 2)
            simulate(*lens, config=config, module=module, seed=seed)


BUILD = """
import sys, torch
from tandem.bench.kernels.compile import compiling, meta
from tandem.kernels.attention.prefill_hopper import prefill_attention_hopper

head_dim = int(sys.argv[1])
pool = meta(99, 36, 2, 8, 64, head_dim, dtype=torch.bfloat16)[:, 3]
q = meta(8192, 32, head_dim, dtype=torch.bfloat16)
tables, starts, lens = (meta(*shape, dtype=torch.int64) for shape in ((4, 64), (5,), (4,)))
with compiling(90) as built:
    prefill_attention_hopper(q, pool, tables, starts, lens, 4096, 0.1, q)
assert built[0].spill_bytes == 0, built[0].spill_bytes
assert built[0].shared_bytes <= 227 * 1024, built[0].shared_bytes
print(built[0].sass())
"""


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_build_for_hopper_runs_the_softmax_beside_a_product(
    compile_environment: dict[str, str], head_dim: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(head_dim)],
        env=compile_environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    marks = re.findall(
        r"HGMMA\.64x\d+x16|DEPBAR\.LE gsb0, 0x\d|MUFU\.EX2|UTMALDG\.2D|USETMAXREG\S* .*0xe8",
        done.stdout,
    )
    assert {"HGMMA.64x128x16", f"HGMMA.64x{head_dim}x16", "UTMALDG.2D"} <= set(marks)
    assert any(mark.startswith("USETMAXREG") for mark in marks)
    # Both consumers, with and without a mask: two products issued, the first one waited for, the
    # exponentials, and then the second one waited for.
    steps = "".join({"D": "w" + mark[-1], "M": "e", "H": "h"}.get(mark[0], "") for mark in marks)
    assert len(re.findall(r"h{12,16}w1e{64,66}w0", steps)) == 4, steps


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="built for sm_90 alone",
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("take_turns", [False, True])
def test_a_gpu_agrees(
    make_paged: Any, dtype: torch.dtype, head_dim: int, block_size: int, take_turns: bool
) -> None:
    lens = [3000, 1, 640, 129, 77]
    paged = make_paged(lens, 2, head_dim, block_size, dtype)
    config = PrefillHopperConfig(take_turns=take_turns)
    check(paged, [2500, 1, 512, 129, 20], 8, torch.device("cuda"), config)
