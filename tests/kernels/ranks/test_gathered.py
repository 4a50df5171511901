"""Ranks that gather one another's parts get the exchanges of those that share memory."""

from pathlib import Path

import pytest

from tests.kernels.ranks.gathering import DTYPES, SUMS
from tests.kernels.ranks.test_exchange import assert_as_in_c, saved_of_each


@pytest.mark.parametrize(
    "num_ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))]
)
def test_ranks_get_the_sums_columns_and_rows_of_the_exchanges_in_c(
    num_ranks: int, tmp_path: Path
) -> None:
    variables = {"GLOO_SOCKET_IFNAME": "lo"}
    found = saved_of_each("tests.kernels.ranks.gathering", num_ranks, tmp_path, variables, 110)
    assert_as_in_c(found, SUMS, DTYPES)
    assert all(each["shared"][0].tolist() == [5, 5, 5] for each in found)
    assert all(each["least"][0] == 101 - num_ranks for each in found)
