"""What a remote prefill is expected to add to computing."""

import pytest

from tandem.decode.transfer_cost import FIXED_S, MAX_CLAIM_S, TransferCost

STAGES = {"queued": 1.0, "claimed": 4.0, "computed": 100.0, "verified": 109.0}


def test_the_first_guess_grows_with_the_bytes_of_a_token() -> None:
    cost = TransferCost(bytes_per_token=2e4)  # 10 µs at the assumed rate
    assert cost.seconds(0) == pytest.approx(FIXED_S, rel=1e-4)
    assert cost.seconds(1000) == pytest.approx(FIXED_S + 0.01, rel=1e-4)


def test_a_measured_link_counts_until_a_handoff_teaches_more() -> None:
    cost = TransferCost(bytes_per_token=131_072)
    assert cost.seconds(6000) > 0.3
    cost.begin_with(3e-6)
    assert cost.seconds(6000) == pytest.approx(FIXED_S + 0.018, rel=0.01)
    cost.observe(6000, STAGES)
    learned_s = cost.seconds(6000)
    cost.begin_with(1.0)
    assert cost.seconds(6000) == learned_s


@pytest.mark.parametrize(
    ("changes", "expected_s"),
    [
        ({}, 0.012),  # 3 ms to the claim, 9 after computing
        ({"claimed": 600.0}, MAX_CLAIM_S + 0.009),  # a busy worker claimed it
        ({"claimed": 0.0, "verified": 112.0}, 0.012),  # clocks of two hosts
        ({"claimed": 13.0, "verified": 99.0}, 0.012),
        ({"other": 1.0}, 0.012),
    ],
)
def test_messages_and_transfer_are_learned(changes: dict[str, float], expected_s: float) -> None:
    cost = TransferCost(0.0)
    for num_tokens in (0, 1000) * 200:
        cost.observe(num_tokens, STAGES | changes)
    assert cost.seconds(500) == pytest.approx(expected_s, rel=0.01)


@pytest.mark.parametrize("stage", STAGES)
def test_a_timeline_that_lacks_a_stage_teaches_nothing(stage: str) -> None:
    cost = TransferCost(0.0)
    cost.observe(100, {name: ms for name, ms in STAGES.items() if name != stage})
    assert cost.seconds(100) == pytest.approx(FIXED_S, rel=1e-4)
