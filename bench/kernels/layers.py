"""The kernels around attention in a layer, and checksums of blocks: 8192 tokens of an 8B model."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tandem.bench.kernels.cases import (
    ERROR_BOUNDS,
    Call,
    Case,
    Check,
    measure_groups,
    relative_error,
)
from tandem.bench.kernels.pool import Pool
from tandem.bench.report.figures import Figure, Target, at_least
from tandem.bench.report.setting import Setting
from tandem.engine.architecture.rope import rope_table
from tandem.engine.architecture.rope_config import RopeConfig
from tandem.kernels.checksum import block_checksums, part_table
from tandem.kernels.layers import activation, embedding, kv_store, norm
from tandem.kernels.reference import activation as activation_reference
from tandem.kernels.reference import embedding as embedding_reference
from tandem.kernels.reference import kv_store as kv_store_reference
from tandem.kernels.reference import norm as norm_reference
from tandem.transfer.checksum import part_checksums

NUM_TOKENS, HIDDEN, INTERMEDIATE, VOCABULARY = 8192, 4096, 12288, 151936
HEADS, KV_HEADS, HEAD_DIM, MAX_LEN = 32, 8, 128, 40960
BLOCK_SIZE, EPS = 64, 1e-6
CHECKSUM_LAYERS, CHECKSUM_BLOCK_SIZES, NUM_CHECKED_BLOCKS = 36, (64, 16), 4
TARGET = at_least(0.85, 0.92, "share")


def run(setting: Setting) -> Iterator[Figure]:
    cases = (store_qkv, store_qkv_without_norm, add_rms_norm, rms_norm, silu_mul, embed)
    yield from measure_groups({each.__name__: each for each in cases}, setting)


def run_checksum(setting: Setting) -> Iterator[Figure]:
    yield from measure_groups({"checksum": checksum}, setting)


def add_rms_norm(
    setting: Setting, num_tokens: int = NUM_TOKENS, hidden: int = HIDDEN
) -> Sequence[Case]:
    num_tokens, hidden = _tokens(setting, num_tokens), setting.size(hidden, 32)
    num_sets = setting.num_sets(8 * num_tokens * hidden)
    x, residual, out = (setting.randn(num_sets, num_tokens, hidden) for _ in range(3))
    weight = setting.randn(hidden)

    def launch(index: int, config: Any) -> None:
        norm.add_rms_norm(x[index], residual[index], weight, EPS, out[index], config=config)

    def check(run: Call) -> float:
        # The norm is of the sum as it was rounded: the reference rounds it too.
        added, expected = residual[0].clone(), torch.empty_like(out[0])
        norm_reference.add_rms_norm(x[0], added, weight, EPS, expected)
        out[0].fill_(float("nan"))
        run()
        errors = relative_error(residual[0], added), relative_error(out[0], expected)
        residual[0].normal_()  # which would grow from call to call
        return max(errors)

    label, num_bytes = f"RMSNorm + residual, {num_tokens} tokens", 4 * x[0].nbytes + weight.nbytes
    return [_case(setting, "add_rms_norm", label, num_bytes, launch, num_sets, check, TARGET)]


def rms_norm(
    setting: Setting, num_tokens: int = NUM_TOKENS, hidden: int = HIDDEN
) -> Sequence[Case]:
    num_tokens, hidden = _tokens(setting, num_tokens), setting.size(hidden, 32)
    num_sets = setting.num_sets(4 * num_tokens * hidden)
    x, out = (setting.randn(num_sets, num_tokens, hidden) for _ in range(2))
    weight = setting.randn(hidden)

    def launch(index: int, config: Any) -> None:
        norm.rms_norm(x[index], weight, EPS, out[index], config=config)

    def check(run: Call) -> float:
        expected = torch.empty(out[0].shape, dtype=torch.float32, device=setting.device)
        norm_reference.rms_norm(x[0].float(), weight.float(), EPS, expected)
        return _error_of(run, out[0], expected)

    label, num_bytes = f"RMSNorm, {num_tokens} tokens", 2 * x[0].nbytes + weight.nbytes
    return [_case(setting, "rms_norm", label, num_bytes, launch, num_sets, check)]


def silu_mul(
    setting: Setting, num_tokens: int = NUM_TOKENS, intermediate: int = INTERMEDIATE
) -> Sequence[Case]:
    num_tokens, intermediate = _tokens(setting, num_tokens), setting.size(intermediate, 48)
    num_sets = setting.num_sets(6 * num_tokens * intermediate)
    gate_up = setting.randn(num_sets, num_tokens, 2 * intermediate)
    out = setting.randn(num_sets, num_tokens, intermediate)

    def launch(index: int, config: Any) -> None:
        activation.silu_mul(gate_up[index], out[index], config=config)

    def check(run: Call) -> float:
        expected = torch.empty(out[0].shape, dtype=torch.float32, device=setting.device)
        activation_reference.silu_mul(gate_up[0].float(), expected)
        return _error_of(run, out[0], expected)

    label, num_bytes = f"SiLU·mul, {num_tokens} tokens", gate_up[0].nbytes + out[0].nbytes
    return [_case(setting, "silu_mul", label, num_bytes, launch, num_sets, check, TARGET)]


def embed(setting: Setting, num_tokens: int = NUM_TOKENS, hidden: int = HIDDEN) -> Sequence[Case]:
    """Embed distinct rows of the table, so that each is read from memory."""
    num_tokens, hidden = _tokens(setting, num_tokens), setting.size(hidden, 32)
    num_sets = setting.num_sets(4 * num_tokens * hidden)
    table = setting.randn(setting.size(VOCABULARY, 64), hidden)
    out = setting.randn(num_sets, num_tokens, hidden)
    ids = [torch.randperm(len(table), device=setting.device)[:num_tokens] for _ in range(num_sets)]

    def launch(index: int, config: Any) -> None:
        embedding.embed(ids[index], table, out[index], config=config)

    def check(run: Call) -> float:
        expected = torch.empty_like(out[0])
        embedding_reference.embed(ids[0], table, expected)
        return _error_of(run, out[0], expected)

    label, num_bytes = f"embedding, {num_tokens} tokens", 2 * out[0].nbytes + ids[0].nbytes
    return [_case(setting, "embed", label, num_bytes, launch, num_sets, check)]


def store_qkv(
    setting: Setting, num_tokens: int = NUM_TOKENS, head_dim: int = HEAD_DIM
) -> Sequence[Case]:
    label = "QK-norm + RoPE + KV store"
    return [_store_case(setting, "store_qkv", label, num_tokens, head_dim, with_norm=True)]


def store_qkv_without_norm(setting: Setting) -> Sequence[Case]:
    name, label = "store_qkv_without_norm", "RoPE + KV store"
    return [_store_case(setting, name, label, NUM_TOKENS, HEAD_DIM, with_norm=False)]


def _store_case(
    setting: Setting, name: str, label: str, num_tokens: int, head_dim: int, *, with_norm: bool
) -> Case:
    """Return a case of one prompt's projections into blocks in random order."""
    num_tokens, head_dim = _tokens(setting, num_tokens), setting.size(head_dim, 16)
    heads, kv_heads = setting.size(HEADS, 4), setting.size(KV_HEADS, 2)
    num_sets = setting.num_sets(4 * num_tokens * (heads + 2 * kv_heads) * head_dim)
    pool = Pool(4 * max(num_tokens, BLOCK_SIZE), num_sets, kv_heads, head_dim, setting)
    table = pool.tables([num_tokens], BLOCK_SIZE, shuffled=True)[0]
    positions = torch.arange(num_tokens, device=setting.device)
    slots = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    qkv = setting.randn(num_sets, num_tokens, heads + 2 * kv_heads, head_dim)
    q_out = setting.randn(num_sets, num_tokens, heads, head_dim)
    qk_norm = setting.randn(heads + kv_heads, head_dim) if with_norm else None
    max_len = setting.size(MAX_LEN, 64)
    table_of_angles = rope_table(RopeConfig(1e4), head_dim, max_len, setting.dtype, setting.device)

    where = (table_of_angles, positions, slots)

    def launch(index: int, config: Any) -> None:
        cache = pool.layer(index, BLOCK_SIZE)
        kv_store.store_qkv(qkv[index], qk_norm, *where, cache, EPS, q_out[index], config=config)

    def check(run: Call) -> float:
        cache = pool.layer(0, BLOCK_SIZE)
        expected_q, expected_cache = q_out[0].float(), cache.float()
        wide_norm = None if qk_norm is None else qk_norm.float()
        wide = (qkv[0].float(), wide_norm, table_of_angles.float(), positions, slots)
        kv_store_reference.store_qkv(*wide, expected_cache, EPS, expected_q)
        q_out[0].fill_(float("nan"))
        cache[table] = float("nan")
        run()
        written = cache.transpose(1, 3)[slots // BLOCK_SIZE, slots % BLOCK_SIZE]
        wanted = expected_cache.transpose(1, 3)[slots // BLOCK_SIZE, slots % BLOCK_SIZE]
        return max(relative_error(q_out[0], expected_q), relative_error(written, wanted))

    num_bytes = qkv[0].nbytes + q_out[0].nbytes + num_tokens * pool.token_bytes
    label = f"{label}, {num_tokens} tokens"
    num_bytes += num_tokens * (table_of_angles[0].nbytes + 16)  # and a position and a slot, int64
    return _case(setting, name, label, num_bytes, launch, num_sets, check, TARGET)


def checksum(setting: Setting) -> Sequence[Case]:
    """Return the cases, which only read, of a pool so large that a prompt's blocks lie apart."""
    num_tokens, num_layers = setting.size(NUM_TOKENS, 128), setting.size(CHECKSUM_LAYERS, 2)
    kv_heads, head_dim = setting.size(KV_HEADS, 2), setting.size(HEAD_DIM, 16)
    pool = Pool(3 * num_tokens, num_layers, kv_heads, head_dim, setting)
    block_sizes = CHECKSUM_BLOCK_SIZES[: setting.size(len(CHECKSUM_BLOCK_SIZES), 1)]
    return [_checksum_case(pool, block_size, num_tokens, setting) for block_size in block_sizes]


def _checksum_case(pool: Pool, block_size: int, num_tokens: int, setting: Setting) -> Case:
    blocks = pool.blocks(block_size)
    ids = pool.tables([num_tokens], block_size, shuffled=True)[0].contiguous()
    words = blocks.view(len(blocks), -1).view(torch.int32)
    parts = part_table([(0, words.shape[1])], setting.device)
    out = torch.empty(len(ids), dtype=torch.int64, device=setting.device)

    def launch(_index: int, config: Any) -> None:
        block_checksums(words, ids, parts, out, config=config)

    def check(run: Call) -> float:
        out.fill_(-1)
        run()
        some = ids[:NUM_CHECKED_BLOCKS]
        here = blocks[some].cpu()
        sums = part_checksums(here, range(len(here)), ((0, here[0].nbytes),), "mix64")
        found = [each % 2**64 for each in out[: len(some)].tolist()]
        return float(sums != found)

    return Case(
        name=f"checksum_block{block_size}",
        label=f"checksum of {len(ids)} blocks of {block_size}",
        work=float(len(ids) * blocks[0].nbytes),
        launch=launch,
        check=check,
        target=TARGET,
    )


def _case(
    setting: Setting,
    name: str,
    label: str,
    num_bytes: int,
    launch: Callable[[int, Any], None],
    num_sets: int,
    check: Check,
    target: Target | None = None,
) -> Case:
    return Case(
        name=name,
        label=label,
        work=float(num_bytes),
        rate="copy",
        launch=launch,
        num_sets=num_sets,
        check=check,
        error_bound=ERROR_BOUNDS[setting.dtype],
        target=target,
    )


def _error_of(run: Call, out: torch.Tensor, expected: torch.Tensor) -> float:
    out.fill_(float("nan"))
    run()
    return relative_error(out, expected)


def _tokens(setting: Setting, num_tokens: int) -> int:
    return setting.size(num_tokens, min(num_tokens, 24))
