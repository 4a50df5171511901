"""Decode attention over one pool of tens of gigabytes, from whose layers calls read in turns."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tandem.bench.kernels.cases import (
    ERROR_BOUNDS,
    Call,
    Case,
    measure_groups,
    mismatch,
    relative_error,
)
from tandem.bench.kernels.pool import Pool, attend, context_of
from tandem.bench.report.figures import Figure, Target, at_least
from tandem.bench.report.setting import Setting
from tandem.kernels.attention.decode import config_for, paged_decode_attention, plan_prefixes
from tandem.kernels.attention.prefixes import SharedPrefixes

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
POOL_POSITIONS, POOL_LAYERS = 64 * 32768, 8  # 69 GB in bfloat16
TINY_POSITIONS = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch of one decode step."""

    label: str
    context_lens: tuple[int, ...]
    block_size: int = 64
    table_tokens: int = 0  # for which the block table has room, as a CUDA graph's has
    target: Target | None = None
    split_weight: float = 0.0  # 0: the table's
    fills_alone: bool = False
    shared_tokens: int = 0  # in the same blocks for all
    is_cascade: bool = False  # reads them together


def run(setting: Setting) -> Iterator[Figure]:
    kv_heads, head_dim = setting.size(KV_HEADS, 2), setting.size(HEAD_DIM, 16)
    positions = setting.size(POOL_POSITIONS, TINY_POSITIONS)
    pool = Pool(positions, setting.size(POOL_LAYERS, 2), kv_heads, head_dim, setting)

    groups = {_name(shape): partial(_cases, shape, pool) for shape in shapes(setting)}
    yield from measure_groups(groups, setting)


def _cases(shape: Shape, pool: Pool, setting: Setting) -> Sequence[Case]:
    """Return the case of a batch; where it shares a prefix also cascade attention, and its plan."""
    if not shape.shared_tokens:
        return [decode_case(shape, pool, setting)]
    cascade = replace(shape, label=f"{shape.label}, cascade", is_cascade=True)
    cases = [decode_case(each, pool, setting) for each in (shape, cascade)]
    return [*cases, _plan_case(shape, pool, setting)]


def shapes(setting: Setting) -> list[Shape]:
    """Return the batches with targets at block size 64, then other block sizes and extras."""
    target = at_least(0.85, 0.92, "share")  # of the bandwidth of the run
    ragged = log_uniform(64, 16, 32768)
    full = [
        Shape("B64 4k", (4096,) * 64, target=target),
        Shape("B128 4k", (4096,) * 128, target=target),
        Shape("B64 8k", (8192,) * 64, target=target),
        Shape("B64 32k", (32768,) * 64, target=target),
        Shape("B64 ragged 16 to 32k", ragged, target=at_least(0.80, 0.88, "share")),
        Shape("B64 4k", (4096,) * 64, 16, target=target),
        Shape("B64 4k", (4096,) * 64, 128, target=target),
        Shape("B64 ragged 16 to 32k", ragged, 16, target=at_least(0.80, 0.88, "share")),
        Shape("B64 4k, tables for 128k", (4096,) * 64, table_tokens=131072),
        Shape("B1 1k", (1024,)),
        Shape("B1 1k, shorter splits", (1024,), split_weight=0.25),
        Shape("B64 4k, shorter splits", (4096,) * 64, split_weight=0.25),
        Shape("B1 1k, every multiprocessor", (1024,), fills_alone=True),
        Shape("B64 1k", (1024,) * 64),
        Shape("B64 1k, every multiprocessor", (1024,) * 64, fills_alone=True),
        Shape("B1 32k", (32768,)),
        Shape("B64 4k, 3k shared", (4096,) * 64, shared_tokens=3072),
        Shape("B8 16k, 15k shared", (16384,) * 8, shared_tokens=15360),
        Shape("B64 1k, 1 block shared", (1024,) * 64, shared_tokens=64),
    ]
    if not setting.is_dry:
        return full
    return [
        Shape("B2 40", (40, 40), target=target),
        Shape("B3 33, shorter splits", (33, 33, 1), split_weight=0.25),
        Shape("B1 70, every multiprocessor", (70,), fills_alone=True),
        Shape("B3 ragged 1 to 70", (1, 33, 70), 16, target=at_least(0.80, 0.88, "share")),
        Shape("B3 90, 64 shared", (90, 70, 80), 16, shared_tokens=64),
    ]


def log_uniform(count: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Return fixed lengths, both ends among them, whose logarithms are spread evenly."""
    draw = torch.rand(count, generator=torch.Generator().manual_seed(4)).tolist()
    span = math.log(longest / shortest)
    lens = [round(shortest * math.exp(span * each)) for each in draw]
    lens[0], lens[-1] = shortest, longest
    return tuple(lens)


def decode_case(shape: Shape, pool: Pool, setting: Setting) -> Case:
    """Return a case; its bytes are the contexts' keys and values, the queries and the output.

    Those of shared tokens count once.
    """
    heads, device = setting.size(HEADS, 4), setting.device
    num_seqs, num_shared = len(shape.context_lens), shape.shared_tokens
    num_tokens = sum(shape.context_lens) - (num_seqs - 1) * num_shared
    context_bytes = num_tokens * pool.token_bytes
    num_sets = setting.num_sets(context_bytes)
    num_tables = math.ceil(num_sets / pool.num_layers)
    tables = [
        _widened(pool.tables(shape.context_lens, shape.block_size, shuffled=True, seed=seed), shape)
        for seed in range(num_tables)
    ]
    for table in tables:
        table[:, : num_shared // shape.block_size] = table[0, : num_shared // shape.block_size]
    context_lens = torch.tensor(shape.context_lens, device=device)
    q = setting.randn(num_seqs, heads, pool.head_dim)
    out, scale = torch.empty_like(q), pool.head_dim**-0.5
    prefixes: list[SharedPrefixes | None] = [None] * num_tables
    if shape.is_cascade:
        first, group_size = pool.layer(0, shape.block_size), heads // pool.num_kv_heads
        prefixes = [plan_prefixes(first, table, context_lens, group_size) for table in tables]

    config = config_for(pool.layer(0, shape.block_size))
    config = replace(config, fills_alone=shape.fills_alone)
    if shape.split_weight:
        config = replace(config, split_weight=shape.split_weight)

    def launch(index: int, config: Any) -> None:
        cache = pool.layer(index, shape.block_size)
        which = index // pool.num_layers % num_tables
        where = cache, tables[which], context_lens
        paged_decode_attention(q, *where, scale, out, prefixes=prefixes[which], config=config)

    def check(run: Call) -> float:
        out.fill_(float("nan"))
        run()
        errors = [0.0 if bool(out.isfinite().all()) else float("inf")]
        cache = pool.layer(0, shape.block_size)
        for seq in _seqs_to_check(shape.context_lens):
            context_len = shape.context_lens[seq]
            keys, values = context_of(cache, tables[0][seq], context_len)
            rows = slice(seq, seq + 1)
            positions = torch.arange(context_len - 1, context_len, device=device)
            expected = attend(q[rows], positions, keys, values, scale)
            errors.append(relative_error(out[rows], expected))
        return max(errors)

    return Case(
        name=_name(shape),
        label=f"decode {shape.label}, block {shape.block_size}",
        work=float(context_bytes + 2 * q.nbytes),
        launch=launch,
        num_sets=num_sets,
        check=check,
        error_bound=ERROR_BOUNDS[setting.dtype],
        config=config,
        target=shape.target,
    )


def _plan_case(shape: Shape, pool: Pool, setting: Setting) -> Case:
    """Return the case of finding what sequences share, once for all layers of a step."""
    num_shared, heads = shape.shared_tokens, setting.size(HEADS, 4)
    tables = pool.tables(shape.context_lens, shape.block_size, shuffled=True)
    tables[:, : num_shared // shape.block_size] = tables[0, : num_shared // shape.block_size]
    context_lens = torch.tensor(shape.context_lens, device=setting.device)
    layer = pool.layer(0, shape.block_size)
    found: list[SharedPrefixes | None] = [None]

    def launch(_index: int, _config: Any) -> None:
        found[0] = plan_prefixes(layer, tables, context_lens, heads // pool.num_kv_heads)

    def check(run: Call) -> float:
        run()
        assert found[0] is not None
        return mismatch(found[0].ends, torch.full_like(found[0].ends, num_shared))

    return Case(
        name=f"{_name(shape)}_plan",
        label=f"prefixes of {shape.label}",
        work=float(tables.nbytes),
        launch=launch,
        check=check,
    )


def _widened(tables: torch.Tensor, shape: Shape) -> torch.Tensor:
    more = shape.table_tokens // shape.block_size - tables.shape[1]
    return torch.nn.functional.pad(tables, (0, max(0, more)))


def _name(shape: Shape) -> str:
    label = shape.label.lower().replace(",", "").replace(" ", "_")
    return f"decode_{label}_block{shape.block_size}"


def _seqs_to_check(context_lens: Sequence[int]) -> set[int]:
    """Return the shortest, the longest, the first and the last, and two between."""
    order = sorted(range(len(context_lens)), key=context_lens.__getitem__)
    count = len(order)
    return {0, count - 1, order[0], order[-1], order[count // 2], order[count // 3]}
