from itertools import count

import pytest

from tandem.bench.report.figures import Target, at_least, at_most
from tandem.bench.report.turns import compared


@pytest.mark.parametrize(
    ("target", "ratio", "failure"),
    [
        (at_most(1.5), 2.0, "2 where <= 1.5 is required"),
        (at_most(2.0), 2.0, ""),
        (at_least(0.6), 0.5, "0.5 where >= 0.6 is required"),
    ],
)
def test_a_work_that_takes_twice_as_long_is_held_against_its_target(
    target: Target, ratio: float, failure: str
) -> None:
    order: list[str] = []
    ticks = count()
    works = {
        "plain": lambda: order.append("plain"),
        "slow": lambda: order.append("slow") or next(ticks),  # a second by this clock
    }
    plain, slow, found = compared("a step", works, 3, target, clock=lambda: next(ticks))
    assert order == ["plain", "slow"] * 5, "two rounds warm up"
    assert (plain.name, plain.samples, slow.samples) == ("a_step_plain_ms", (1e3,) * 3, (2e3,) * 3)
    assert (found.samples, found.failure) == ((ratio,) * 3, failure)
