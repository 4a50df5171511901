"""Prefill attention and torch's own, in turns on the same data."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tandem.bench.kernels.cases import (
    ERROR_BOUNDS,
    Call,
    Case,
    Group,
    measure_groups,
    relative_error,
)
from tandem.bench.kernels.pool import Pool, attend, context_of
from tandem.bench.report.figures import Figure, Target, at_least
from tandem.bench.report.setting import Setting
from tandem.kernels.attention.prefill import (
    BLOCKS_OF_64,
    FIRST_TMA_ARCH,
    PrefillAttentionConfig,
    config_for,
    prefill_attention,
)
from tandem.kernels.tuned import architecture

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LENGTHS = {"8k": 8192, "16k": 16384, "32k": 32768}
BLOCK_SIZES = (16, 64, 128)
DENSE_TARGET, PAGED_TARGET = at_least(600.0, 660.0), at_least(560.0, 620.0)  # TFLOP/s
NUM_LAYERS = 4
NUM_CHECKED_ROWS = 48
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}

Attention = Callable[..., None]


def run(setting: Setting) -> Iterator[Figure]:
    """Measure whole prompts of each length, then chunks over a context and a ragged batch."""

    def of_length(name: str, length: int, setting: Setting) -> Sequence[Case]:
        return [*_sdpa(name, length, setting), *_whole_prompts(name, length, setting)]

    lengths = list(LENGTHS.items())[: setting.size(len(LENGTHS), 1)]
    groups = {f"prefill {name}": partial(of_length, name, length) for name, length in lengths}
    yield from measure_groups({**groups, "prefill of chunks": prefill_of_chunks}, setting)


def run_hopper(setting: Setting) -> Iterator[Figure]:
    """Measure the kernel that is written for one chip; nothing on another."""
    if setting.is_dry or torch.cuda.get_device_capability(setting.device) != (9, 0):
        return
    # Imported here: elsewhere the compiler may lack its features.
    from tandem.kernels.attention.prefill_hopper import prefill_attention_hopper

    def of_kind(kind: str, target: Target, setting: Setting) -> Sequence[Case]:
        return [
            prefill_case(
                f"prefill_hopper_{kind}_{name}_block{block_size}",
                f"prefill {kind} {name}, block {block_size} (warp-specialized)",
                [(length, length)],
                block_size,
                setting,
                shuffled=kind == "paged",
                target=target,
                attention=prefill_attention_hopper,
            )
            for name, length in LENGTHS.items()
            for block_size in (64, 128)
        ]

    def ragged(setting: Setting) -> Sequence[Case]:
        case = prefill_case(
            "prefill_hopper_paged_ragged_block64",
            "prefill paged 5 prompts of 0.5k to 8k, block 64 (warp-specialized)",
            [(length, length) for length in RAGGED],
            64,
            setting,
            shuffled=True,
            attention=prefill_attention_hopper,
        )
        return [case]

    groups: dict[str, Group] = {
        "prefill dense, warp-specialized": partial(of_kind, "dense", DENSE_TARGET),
        "prefill paged, warp-specialized": partial(of_kind, "paged", PAGED_TARGET),
        "prefill ragged, warp-specialized": ragged,
    }
    yield from measure_groups(groups, setting)


def _by_threads(*arguments: Any, config: PrefillAttentionConfig | None = None) -> None:
    """Launch prefill attention without the kernel that is written for one chip."""
    chosen = config or config_for(arguments[1])
    prefill_attention(*arguments, config=replace(chosen, warp_specialized=False))


def _whole_prompts(name: str, length: int, setting: Setting) -> Iterator[Case]:
    length = setting.size(length, 40)
    for block_size in BLOCK_SIZES[: setting.size(len(BLOCK_SIZES), 2)]:
        for kind, target in (("dense", DENSE_TARGET), ("paged", PAGED_TARGET)):
            yield prefill_case(
                f"prefill_{kind}_{name}_block{block_size}",
                f"prefill {kind} {name}, block {block_size}",
                [(length, length)],
                block_size,
                setting,
                shuffled=kind == "paged",
                target=target,
                attention=_by_threads,
            )
    if setting.is_dry or architecture() >= FIRST_TMA_ARCH:
        case = prefill_case(
            f"prefill_paged_{name}_block64_by_tma",
            f"prefill paged {name}, block 64, tiles of 64 by TMA",
            [(length, length)],
            64,
            setting,
            shuffled=True,
        )
        yield replace(case, config=BLOCKS_OF_64)


def prefill_of_chunks(setting: Setting) -> Sequence[Case]:
    """Return the batches of chunked prefill and prefix hits, and several prompts together."""
    long = setting.size(32768, 48)
    ragged = [setting.size(length, 8 + index) for index, length in enumerate(RAGGED)]
    shapes = {
        "2k of 32k": [(setting.size(2048, 8), long)],
        "4k of 32k": [(setting.size(4096, 16), long)],
        "5 prompts of 0.5k to 8k": [(length, length) for length in ragged],
    }
    return [
        prefill_case(
            f"prefill_paged_{shape.replace(' ', '_')}_block64",
            f"prefill paged {shape}, block 64",
            queries,
            64,
            setting,
            shuffled=True,
            target=PAGED_TARGET if index < 2 else None,
        )
        for index, (shape, queries) in enumerate(shapes.items())
    ]


RAGGED = (8191, 3000, 517, 6145, 2048)


def prefill_case(
    name: str,
    label: str,
    queries: Sequence[tuple[int, int]],  # (query_len, context_len) per sequence
    block_size: int,
    setting: Setting,
    *,
    shuffled: bool,
    target: Target | None = None,
    head_dim: int = HEAD_DIM,
    attention: Attention = prefill_attention,
) -> Case:
    """Return causal attention of a batch; FLOPs count the positions that each query sees."""
    heads, kv_heads, head_dim = (
        setting.size(full, tiny) for full, tiny in ((HEADS, 4), (KV_HEADS, 2), (head_dim, 16))
    )
    pool = _pool(queries, setting, kv_heads, head_dim)
    device, num_tokens = setting.device, sum(query_len for query_len, _ in queries)
    context_lens = [context_len for _, context_len in queries]
    table = pool.tables(context_lens, block_size, shuffled=shuffled)
    ends = torch.tensor([0, *(query_len for query_len, _ in queries)]).cumsum(0)
    starts, lens = ends.to(device), torch.tensor(context_lens, device=device)
    longest, scale = max(query_len for query_len, _ in queries), head_dim**-0.5
    q = setting.randn(pool.num_layers, num_tokens, heads, head_dim)
    out = torch.empty_like(q[0])

    def launch(index: int, config: Any) -> None:
        cache = pool.layer(index, block_size)
        attention(q[index], cache, table, starts, lens, longest, scale, out, config=config)

    def check(run: Call) -> float:
        out.fill_(float("nan"))
        run()
        errors = [0.0 if bool(out.isfinite().all()) else float("inf")]
        for row, (query_len, context_len) in enumerate(queries):
            keys, values = context_of(pool.layer(0, block_size), table[row], context_len)
            rows = _rows_to_check(query_len, block_size).to(device)
            mine = int(ends[row]) + rows
            positions = rows + context_len - query_len
            errors.append(
                relative_error(out[mine], attend(q[0][mine], positions, keys, values, scale))
            )
        return max(errors)

    return Case(
        name=name,
        label=label,
        unit="TFLOP/s",
        work=_flops(queries, heads, head_dim),
        rate="matmul",
        launch=launch,
        num_sets=setting.size(pool.num_layers, 1),
        check=check,
        error_bound=ERROR_BOUNDS[setting.dtype],
        target=target,
    )


def _pool(
    queries: Sequence[tuple[int, int]], setting: Setting, kv_heads: int, head_dim: int
) -> Pool:
    block = max(BLOCK_SIZES)
    # As much again stays unused, so that a shuffled table has gaps.
    positions = 2 * sum(-(-context_len // block) * block for _, context_len in queries)
    return Pool(positions, setting.size(NUM_LAYERS, 2), kv_heads, head_dim, setting)


def _sdpa(name: str, length: int, setting: Setting) -> Iterator[Case]:
    length = setting.size(length, 40)
    heads, kv_heads, head_dim = (
        setting.size(full, tiny) for full, tiny in ((HEADS, 4), (KV_HEADS, 2), (HEAD_DIM, 16))
    )
    q = setting.randn(2, 1, heads, length, head_dim)
    k, v = (setting.randn(2, 1, kv_heads, length, head_dim) for _ in range(2))
    backends = {"math": SDPBackend.MATH} if setting.is_dry else BACKENDS
    for backend_name, backend in backends.items():
        yield _sdpa_case(name, backend_name, backend, q, k, v, setting)


def _sdpa_case(
    length_name: str,
    backend_name: str,
    backend: SDPBackend,
    q: torch.Tensor,  # [num_sets, 1, heads, length, head_dim]
    k: torch.Tensor,  # [num_sets, 1, kv_heads, length, head_dim]
    v: torch.Tensor,
    setting: Setting,
) -> Case:
    heads, length, head_dim = q.shape[2:]
    group_size = heads // k.shape[2]
    is_grouped = _takes_groups(backend, q[0], k[0], v[0])
    if not is_grouped:
        # Such a backend gets every KV head once per query head, as in practice.
        k, v = k.repeat_interleave(group_size, 2), v.repeat_interleave(group_size, 2)

    def launch(index: int, _config: None = None) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                q[index], k[index], v[index], is_causal=True, enable_gqa=is_grouped
            )

    def check(_run: Call) -> float:
        rows = _rows_to_check(length, 64).to(setting.device)
        with warnings.catch_warnings(record=True) as reasons:
            warnings.simplefilter("always")
            try:
                result = launch(0)
            except RuntimeError as error:
                raise RuntimeError("; ".join(str(each.message) for each in reasons)) from error
        keys, values = (one[0, 0].transpose(0, 1) for one in (k, v))
        mine = q[0, 0][:, rows].transpose(0, 1)
        expected = attend(mine, rows, keys, values, head_dim**-0.5)
        return relative_error(result[0][:, rows].transpose(0, 1), expected)

    return Case(
        name=f"sdpa_{backend_name}_{length_name}",
        label=f"torch SDPA {backend_name} {length_name}",
        unit="TFLOP/s",
        work=_flops([(length, length)], heads, head_dim),
        rate="matmul",
        launch=launch,
        num_sets=len(q),
        check=check,
        error_bound=ERROR_BOUNDS[setting.dtype],
        notes=() if is_grouped else ("KV heads expanded",),
        is_ours=False,
    )


def _takes_groups(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    with warnings.catch_warnings(), sdpa_kernel(backend):
        warnings.simplefilter("ignore")  # one per reason why not
        try:
            scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        except RuntimeError:
            return False
    return True


def _rows_to_check(num_rows: int, block_size: int) -> torch.Tensor:
    """Return the ends, the edges of a block and of a tile, and some between."""
    edges = {0, 1, block_size - 1, block_size, 127, 128, num_rows - 2, num_rows - 1}
    between = torch.randint(num_rows, (NUM_CHECKED_ROWS,)).tolist()
    return torch.tensor(sorted(row for row in edges | set(between) if 0 <= row < num_rows))


def _flops(queries: Sequence[tuple[int, int]], heads: int, head_dim: int) -> float:
    seen = sum(
        query_len * (context_len - query_len) + query_len * (query_len + 1) // 2
        for query_len, context_len in queries
    )
    return 4.0 * heads * head_dim * seen  # a multiplication and an addition, for QK and for PV
