"""The place of a prompt's prefill."""

import pytest

from tandem.decode.admission import (
    RATE_LIFETIME_S,
    Decision,
    PlacementCause,
    PrefillSide,
    decide,
    recent_rate,
)
from tandem.decode.config import DisaggConfig, Policy
from tandem.runtime.token_rate import TokenRate


def side(**changes: object) -> PrefillSide:
    known = PrefillSide(num_instances=1, queue_connected=True)
    for name, value in changes.items():
        setattr(known, name, value)
    return known


def rate(s_per_token: float) -> TokenRate:
    known = recent_rate()
    known.observe(1, s_per_token, now=0.0)
    return known


THRESHOLD = DisaggConfig(policy=Policy.THRESHOLD, max_local_prefill_length=100)


@pytest.mark.parametrize(
    ("num_uncached", "place", "cause"),
    [
        (0, "local", PlacementCause.SHORT),
        (100, "local", PlacementCause.SHORT),
        (101, "remote", PlacementCause.LONG),
    ],
)
def test_the_threshold_is_the_longest_prompt_that_stays_local(
    num_uncached: int, place: str, cause: PlacementCause
) -> None:
    decision = decide(THRESHOLD, num_uncached, side())
    assert (decision.place, decision.cause) == (place, cause)
    assert (decision.num_uncached, decision.limit) == (num_uncached, 100)


def test_a_full_queue_keeps_a_long_prompt_local() -> None:
    assert decide(THRESHOLD, 500, side(num_queued_jobs=1)).place == "remote"
    decision = decide(THRESHOLD, 500, side(num_queued_jobs=2))
    assert (decision.place, decision.cause) == ("local", PlacementCause.QUEUE_FULL)
    assert (decision.num_queued, decision.limit) == (2, 2)


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("placement", [None, "remote"])
def test_without_a_prefill_worker_or_a_queue_everything_is_local(
    policy: Policy, placement: str | None
) -> None:
    config = DisaggConfig(policy=policy)
    assert decide(config, 5000, side(num_instances=0), placement=placement).place == "local"
    assert decide(config, 5000, side(queue_connected=False), placement=placement).place == "local"


@pytest.mark.parametrize("policy", list(Policy))
def test_a_request_s_placement_beats_the_policy(policy: Policy) -> None:
    config = DisaggConfig(policy=policy)
    assert decide(config, 5000, side(), placement="local").place == "local"
    assert decide(config, 1, side(), placement="remote").place == "remote"


def test_always_means_always() -> None:
    local = DisaggConfig(policy=Policy.ALWAYS_LOCAL)
    remote = DisaggConfig(policy=Policy.ALWAYS_REMOTE)
    assert decide(local, 100_000, side()).place == "local"
    assert decide(remote, 1, side(num_queued_jobs=99)).place == "remote"


def test_adaptive_measures_the_local_path_first_and_the_remote_path_next() -> None:
    config = THRESHOLD.model_copy(update={"policy": Policy.ADAPTIVE})
    assert decide(config, 50, side()).cause is PlacementCause.SHORT
    assert decide(config, 500, side(), now=0.0).cause is PlacementCause.UNMEASURED
    assert decide(config, 500, side(remote=rate(1e-9)), now=0.0).cause is PlacementCause.UNMEASURED
    assert decide(config, 500, side(local=rate(1e-9)), now=0.0).place == "remote"


def test_adaptive_goes_where_the_prompt_is_ready_sooner() -> None:
    config = THRESHOLD.model_copy(update={"policy": Policy.ADAPTIVE})
    slow, fast = rate(3e-3), rate(1e-3)
    assert (
        decide(config, 500, side(local=slow, remote=fast), now=0.0).cause is PlacementCause.FASTER
    )
    decision = decide(config, 500, side(local=fast, remote=slow), now=0.0)
    assert (decision.place, decision.cause) == ("local", PlacementCause.SLOWER)
    assert (decision.remote_ms, decision.local_ms) == pytest.approx((1500.0, 500.0))


def test_adaptive_counts_what_a_local_prefill_costs_the_running_sequences() -> None:
    config = THRESHOLD.model_copy(update={"policy": Policy.ADAPTIVE})
    rates = {"local": rate(1e-3), "remote": rate(1.5e-3)}
    assert decide(config, 500, side(**rates), now=0.0).place == "local"
    assert decide(config, 500, side(num_running=3, **rates), now=0.0).place == "remote"


def test_an_old_rate_is_forgotten_so_that_a_slow_path_is_tried_again() -> None:
    config = THRESHOLD.model_copy(update={"policy": Policy.ADAPTIVE})
    rates = {"local": rate(1e-3), "remote": rate(9e-3)}
    assert decide(config, 500, side(**rates), now=1.0).place == "local"
    rates["local"].observe(1, 1e-3, now=RATE_LIFETIME_S)
    assert decide(config, 500, side(**rates), now=RATE_LIFETIME_S + 1).place == "remote"


def test_a_rate_follows_its_measurements() -> None:
    known = recent_rate()
    known.observe(100, 0.1, now=0.0)
    known.observe(100, 0.2, now=1.0)
    assert known.current(1.0) == pytest.approx(1.3e-3)


@pytest.mark.parametrize("cause", list(PlacementCause))
def test_every_cause_has_a_sentence(cause: PlacementCause) -> None:
    decision = Decision("local", cause, Policy.THRESHOLD, 37, 2, 1000, 1.25, 2.5, "link down")
    assert decision.reason and "{" not in decision.reason


def test_a_reason_names_the_numbers_that_were_compared() -> None:
    assert decide(THRESHOLD, 37, side()).reason == "uncached 37 <= max_local_prefill_length 100"
