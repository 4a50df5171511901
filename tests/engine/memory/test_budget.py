"""How a GPU's memory is shared out, on a GPU that is only described."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.architecture.config import load_model_config
from tandem.engine.architecture.rope import rope_tables
from tandem.engine.batch.batch import Batch
from tandem.engine.config import EngineConfig
from tandem.engine.decoder.decoder import Model
from tandem.engine.decoder.kernel_set import load_kernels
from tandem.engine.execution.profile import StepProfile
from tandem.engine.memory.budget import (
    GRAPH_BYTES,
    UNSEEN_BYTES,
    Reserve,
    decode_graph_bytes,
    kv_budget_bytes,
)
from tandem.engine.memory.kv_blocks import (
    block_bytes,
    most_useful_blocks,
    num_blocks_within,
    num_spare_blocks,
)
from tandem.engine.weights.weights import load_weights
from tandem.models.random_model import write_random_model
from tandem.runtime.wire.block_hash import num_blocks_of

GIB = 2**30
LONGEST = 40


@dataclass
class FakeMemory:
    """A GPU of which this process holds some and others hold the rest that isn't free."""

    total: int = 80 * GIB
    free: int = 60 * GIB
    held: int = 16 * GIB
    peaks: list[int] = field(default_factory=list)  # of the runs to come

    def total_bytes(self) -> int:
        return self.total

    def free_bytes(self) -> int:
        return self.free

    def held_bytes(self) -> int:
        return self.held

    def peak_bytes(self, run: Callable[[], None]) -> int:
        run()
        return self.peaks.pop(0)


def budget(memory: FakeMemory, reserve: Reserve, fraction: float = 0.9) -> int:
    return kv_budget_bytes(EngineConfig(kv_memory_fraction=fraction), memory, reserve)


def test_the_pool_gets_its_fraction_less_weights_and_steps() -> None:
    reserve = Reserve(step_bytes=2 * GIB, graph_bytes=GIB)
    given = budget(FakeMemory(), reserve, fraction=0.5)
    assert given == (40 - 16 - 3) * GIB - UNSEEN_BYTES


def test_what_others_hold_is_not_given_away() -> None:
    reserve = Reserve(step_bytes=2 * GIB, graph_bytes=GIB)
    given = budget(FakeMemory(free=10 * GIB), reserve)
    assert given == (10 - 3) * GIB - UNSEEN_BYTES


def test_a_full_gpu_gives_nothing_rather_than_less() -> None:
    assert budget(FakeMemory(free=GIB), Reserve(step_bytes=2 * GIB, graph_bytes=0)) == 0
    assert budget(FakeMemory(), Reserve(GIB, 0), fraction=0.1) == 0


def test_every_batch_size_keeps_its_logits_and_shares_the_rest() -> None:
    assert decode_graph_bytes([1, 2, 4], GIB, 1000) == GIB + 7 * 1000 + 3 * GRAPH_BYTES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = write_random_model(tmp_path_factory.mktemp("model"))
    return folder


class WatchedModel(Model):
    """Keeps what it was asked to compute."""

    batches: list[Batch]

    def hidden(self, batch: Batch, *args: Any, **options: Any) -> torch.Tensor:
        self.batches.append(batch)
        return super().hidden(batch, *args, **options)


def make_profile(folder: Path, **options: Any) -> tuple[StepProfile, WatchedModel]:
    options = {"max_num_batched_tokens": 200} | options
    config = EngineConfig(model=str(folder), block_size=16, **options)
    model_config = load_model_config(folder)
    kernels = load_kernels("torch")
    cpu = torch.device("cpu")
    weights = load_weights(folder, model_config, torch.float32, cpu)
    tables = rope_tables(model_config, LONGEST, torch.float32, cpu)
    model = WatchedModel(model_config, weights, tables, kernels)
    model.batches = []
    profile = StepProfile(config, model_config, model, kernels, LONGEST, cpu)
    return profile, model


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_tokens", "prompts", "num_decodes"),
    [
        (4, 100, [40, 40, 19], 1),
        (8, 30, [23], 7),
        (8, 8, [], 8),
        (9, 5, [], 5),
        (2, 500, [40, 40], 0),
    ],
)
def test_the_profiled_steps_are_the_largest_there_can_be(
    folder: Path, max_num_seqs: int, max_num_tokens: int, prompts: list[int], num_decodes: int
) -> None:
    profile, model = make_profile(
        folder, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_tokens
    )
    reserve = profile.reserve(FakeMemory(peaks=[5 * GIB, GIB]))
    mixed, decode = model.batches
    assert mixed.prefills.context_lens.tolist() == prompts
    assert len(mixed.decodes) == num_decodes
    assert len(mixed.logits_indices) == min(max_num_seqs, max_num_tokens)
    assert len(decode.decodes) == min(max_num_seqs, max_num_tokens)
    assert decode.decodes.block_tables.shape[1] * 16 >= LONGEST
    assert decode.slot_mapping.tolist() == [-1] * len(decode.decodes)
    assert reserve.step_bytes == 5 * GIB and reserve.graph_bytes > GIB


def test_nothing_is_set_aside_for_graphs_that_are_off(folder: Path) -> None:
    profile, _ = make_profile(folder, cuda_graphs=False)
    reserve = profile.reserve(FakeMemory(peaks=[GIB, 2 * GIB]))
    assert reserve == Reserve(step_bytes=2 * GIB, graph_bytes=0)


def test_a_pool_is_no_larger_than_its_sequences_can_use_and_kernels_can_address(
    folder: Path,
) -> None:
    """A small model on a GPU would get millions of blocks, each with descriptors of its own."""
    model = load_model_config(folder)
    few, many = (EngineConfig(model=str(folder), max_num_seqs=num) for num in (4, 2**30))
    assert most_useful_blocks(few, model, 16, LONGEST) == 4 * 4 * num_blocks_of(LONGEST, 16)
    num_blocks = most_useful_blocks(many, model, 16, LONGEST)
    num_all = num_blocks + num_spare_blocks(1, "VRAM", num_blocks)
    rows_per_block = model.num_layers * 2 * model.num_kv_heads * 16
    assert 2**30 < num_all * rows_per_block < 2**31


def test_the_spare_blocks_of_a_gpu_take_longer_to_move_than_the_host_s_jitter() -> None:
    """An 8B model's block is 9.4 MB, and 50 GB/s is a slow link between GPUs."""
    size = 36 * 2 * 8 * 64 * 128 * 2
    assert num_spare_blocks(size, "VRAM", 5000) * size / 50e9 > 0.004


@pytest.mark.parametrize("memory", ["DRAM", "VRAM"])
@pytest.mark.parametrize("num_wanted", [0, 1, 3, 50, 10_000])
def test_spare_blocks_come_out_of_the_budget(folder: Path, memory: Any, num_wanted: int) -> None:
    model = load_model_config(folder)
    size = block_bytes(model, 16)
    num_blocks = num_blocks_within(num_wanted * size, model, 16, memory)
    num_spare = num_spare_blocks(size, memory, num_blocks)
    assert num_blocks == 0 or num_blocks + num_spare <= num_wanted
    assert num_blocks >= num_wanted * 3 // 4 - 2
    assert num_blocks_within(num_wanted * size + size - 1, model, 16, memory) == num_blocks
