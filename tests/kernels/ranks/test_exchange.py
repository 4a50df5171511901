"""The ranks' exchanges on GPUs: bit for bit those on CPUs. Each rank is a process here."""

import mmap
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tandem.kernels.cpu.ranks import RankExchange, shared_bytes
from tests.kernels.ranks.forked import EXACT, NUM_DELAYED, SUMS, logits, parts, rows
from tests.kernels.tolerance import on_cpu

pytestmark = [on_cpu, pytest.mark.timeout(300)]  # processes that wait for one another, interpreted

ROOT = Path(__file__).parents[3]
BUFFER_BYTES = 1 << 20

Found = list[dict[str, list[torch.Tensor]]]  # by rank


def sum_on_cpu(num_ranks: int, shape: tuple[int, ...]) -> torch.Tensor:
    memory = mmap.mmap(-1, shared_bytes(num_ranks, BUFFER_BYTES))
    where = num_ranks, BUFFER_BYTES, os.getppid(), 60.0
    ranks = [RankExchange(memory, rank, *where) for rank in range(num_ranks)]
    with ThreadPoolExecutor(num_ranks) as pool:
        calls = pool.map(lambda a, b: a.add_up(b, b.dtype), ranks, parts(num_ranks, shape))
        return next(iter(list(calls)))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_get_the_sums_columns_and_rows_of_the_exchanges_in_c(
    num_ranks: int, tmp_path: Path
) -> None:
    variables = {"TRITON_INTERPRET": "1"}
    found = saved_of_each("tests.kernels.ranks.forked", num_ranks, tmp_path, variables, 280)
    assert_as_in_c(found, SUMS, EXACT)
    for number in range(NUM_DELAYED):
        total = sum(number * 8 + rank for rank in range(num_ranks))
        assert [each["delayed"][number].item() for each in found] == [total] * num_ranks


def saved_of_each(
    module: str, num_ranks: int, folder: Path, variables: Mapping[str, str], timeout_s: float
) -> Found:
    """Run a module that saves what each rank's calls return; return that, by rank."""
    command = [sys.executable, "-m", module, str(num_ranks), str(folder)]
    environment = os.environ | variables | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, env=environment, cwd=ROOT, timeout=timeout_s)
    return [torch.load(folder / f"{rank}.pt") for rank in range(num_ranks)]


def assert_as_in_c(
    found: Found,
    sums: Sequence[tuple[tuple[int, ...], torch.dtype]],
    dtypes: Sequence[torch.dtype],  # of columns
) -> None:
    num_ranks = len(found)
    for index, (shape, dtype) in enumerate(sums):
        expected = bits(sum_on_cpu(num_ranks, shape).to(dtype))
        assert all(torch.equal(bits(each["sums"][index]), expected) for each in found)
    for columns, dtype in zip(found[0]["columns"], dtypes, strict=True):
        assert torch.equal(columns, logits(num_ranks, dtype))
    whole, _ = rows(num_ranks)
    assert all(torch.equal(bits(each["rows"][0]), bits(whole)) for each in found)


def bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view(torch.uint8)
