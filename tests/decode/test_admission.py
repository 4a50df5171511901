"""Who computes a prompt."""

import pytest

from tandem.decode.admission import RATE_LIFETIME_S, PrefillRate, PrefillSide, decide
from tandem.decode.config import DisaggConfig, Policy


def side(**changes: object) -> PrefillSide:
    known = PrefillSide(num_instances=1, queue_connected=True)
    for name, value in changes.items():
        setattr(known, name, value)
    return known


def rate(s_per_token: float) -> PrefillRate:
    known = PrefillRate()
    known.observe(1, s_per_token, now=0.0)
    return known


THRESHOLD = DisaggConfig(policy=Policy.THRESHOLD, max_local_prefill_length=100)


@pytest.mark.parametrize(
    ("num_uncached", "place", "cause"),
    [(0, "local", "short"), (100, "local", "short"), (101, "remote", "long")],
)
def test_the_threshold_is_the_longest_prompt_that_stays_local(
    num_uncached: int, place: str, cause: str
) -> None:
    decision = decide(THRESHOLD, num_uncached, side())
    assert (decision.place, decision.cause) == (place, cause)
    assert str(num_uncached) in decision.reason and "100" in decision.reason


def test_a_full_queue_keeps_a_long_prompt_local() -> None:
    assert decide(THRESHOLD, 500, side(num_queued_jobs=1)).place == "remote"
    decision = decide(THRESHOLD, 500, side(num_queued_jobs=2))
    assert (decision.place, decision.cause) == ("local", "queue_full")


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("wish", [None, "remote"])
def test_without_a_prefill_worker_or_a_queue_everything_is_local(
    policy: Policy, wish: str | None
) -> None:
    config = DisaggConfig(policy=policy)
    assert decide(config, 5000, side(num_instances=0), wish=wish).place == "local"
    assert decide(config, 5000, side(queue_connected=False), wish=wish).place == "local"


@pytest.mark.parametrize("policy", list(Policy))
def test_a_request_s_wish_beats_the_policy(policy: Policy) -> None:
    config = DisaggConfig(policy=policy)
    assert decide(config, 5000, side(), wish="local").place == "local"
    assert decide(config, 1, side(), wish="remote").place == "remote"


def test_always_means_always() -> None:
    local = DisaggConfig(policy=Policy.ALWAYS_LOCAL)
    remote = DisaggConfig(policy=Policy.ALWAYS_REMOTE)
    assert decide(local, 100_000, side()).place == "local"
    assert decide(remote, 1, side(num_queued_jobs=99)).place == "remote"


def test_adaptive_measures_the_local_way_first_and_the_remote_way_next() -> None:
    config = THRESHOLD.model_copy(update={"policy": Policy.ADAPTIVE})
    assert decide(config, 50, side()).cause == "short"
    assert decide(config, 500, side(), now=0.0).cause == "unmeasured"
    assert decide(config, 500, side(remote=rate(1e-9)), now=0.0).cause == "unmeasured"
    assert decide(config, 500, side(local=rate(1e-9)), now=0.0).place == "remote"


def test_adaptive_goes_where_the_prompt_is_ready_sooner() -> None:
    config = THRESHOLD.model_copy(update={"policy": Policy.ADAPTIVE})
    slow, fast = rate(3e-3), rate(1e-3)
    assert decide(config, 500, side(local=slow, remote=fast), now=0.0).cause == "faster"
    decision = decide(config, 500, side(local=fast, remote=slow), now=0.0)
    assert (decision.place, decision.cause) == ("local", "slower")
    assert "1500.0 ms remote > 500.0 local" in decision.reason


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
    known = PrefillRate()
    known.observe(100, 0.1, now=0.0)
    known.observe(100, 0.2, now=1.0)
    assert known.current(1.0) == pytest.approx(1.3e-3)
