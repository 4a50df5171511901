"""Both sides of UCX in one process, and peers in processes of their own."""

from collections.abc import Callable, Iterator

import pytest

from tests.transfer.ucx.sides import Side, sides


@pytest.fixture
def make() -> Iterator[Callable[..., Side]]:
    with sides() as make_side:
        yield make_side


@pytest.fixture
def pair(make: Callable[..., Side]) -> tuple[Side, Side]:
    return make("p"), make("d", zeros=True)
