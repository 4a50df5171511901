"""Checksums of the blocks of a prompt of 8192 tokens, all layers of them."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tandem.bench.kernels.cases import Call, Case, measure_groups
from tandem.bench.kernels.pool import Pool
from tandem.bench.report.figures import Figure, at_least
from tandem.bench.report.setting import Setting
from tandem.kernels.checksum import block_checksums, part_table
from tandem.transfer.checksum import part_checksums

NUM_TOKENS, KV_HEADS, HEAD_DIM, NUM_LAYERS = 8192, 8, 128, 36
BLOCK_SIZES = (64, 16)
TARGET = at_least(0.85, 0.92, "share")
NUM_CHECKED_BLOCKS = 4


def run(setting: Setting) -> Iterator[Figure]:
    yield from measure_groups([checksum], setting)


def checksum(setting: Setting) -> Sequence[Case]:
    """Return the cases, which only read, of a pool so large that a prompt's blocks lie apart."""
    num_tokens, num_layers = setting.size(NUM_TOKENS, 128), setting.size(NUM_LAYERS, 2)
    kv_heads, head_dim = setting.size(KV_HEADS, 2), setting.size(HEAD_DIM, 16)
    pool = Pool(3 * num_tokens, num_layers, kv_heads, head_dim, setting)
    block_sizes = BLOCK_SIZES[: setting.size(len(BLOCK_SIZES), 1)]
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
        whole = ((0, here[0].nbytes),)
        sums = part_checksums(here, range(len(here)), whole, "mix64")
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
