"""Ranks that gather one another's parts get the exchanges of those that share memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.ranks.forked import logits, rows
from tests.kernels.ranks.gathering import DTYPES, SUMS
from tests.kernels.ranks.test_exchange import ROOT, bits, sum_on_cpu


@pytest.mark.parametrize(
    "num_ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))]
)
def test_ranks_get_the_sums_columns_and_rows_of_the_exchanges_in_c(
    num_ranks: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.kernels.ranks.gathering", str(num_ranks), str(tmp_path)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, env=environment, cwd=ROOT, timeout=110)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(num_ranks)]

    for index, (shape, dtype) in enumerate(SUMS):
        expected = bits(sum_on_cpu(num_ranks, shape).to(dtype))
        assert all(torch.equal(bits(each["sums"][index]), expected) for each in found)
    for columns, dtype in zip(found[0]["columns"], DTYPES, strict=True):
        assert torch.equal(columns, logits(num_ranks, dtype))
    whole, _ = rows(num_ranks)
    assert all(torch.equal(bits(each["rows"][0]), bits(whole)) for each in found)
    assert all(each["shared"][0].tolist() == [5, 5, 5] for each in found)
    assert all(each["least"][0] == 101 - num_ranks for each in found)
