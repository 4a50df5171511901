"""Prefill workers that idle while prompts wait."""

import pytest

from tandem.router.idle import idle_prefill
from tandem.runtime.wire.cluster_messages import (
    Instance,
    LoadReport,
    StepCosts,
    WorkerRole,
    WorkerStatus,
)

COSTS = StepCosts((0.01, 0.0, 0.0), (0.0, 1e-3, 0.0), 0.05, 100_000, 100_000)  # 1 ms a token


def worker(
    name: str,
    role: WorkerRole,
    waiting_tokens: int = 0,
    *,
    deployment: str = "d",
    costs: StepCosts | None = COSTS,
    num_waiting: int = 0,
    **prompts: int,
) -> WorkerStatus:
    instance = Instance("ns", role, "generate", name, "", "e", "m", deployment=deployment)
    load = LoadReport(
        *(name, "e", role, 0, num_waiting, waiting_tokens, 9, 9, 0),
        costs=costs,
    )
    counts = {f"prompts.local.{cause}": number for cause, number in prompts.items()}
    details = counts | {"prompts.remote.faster": 99}
    return WorkerStatus(instance, "serving", load, details)


def test_the_place_of_the_longest_wait_and_the_commonest_cause_of_all_workers_are_told() -> None:
    [found] = idle_prefill(
        [
            worker("p", "prefill"),
            worker("a", "decode", 1500, slower=3, short=9),
            worker("b", "decode", 4000, slower=8),
        ]
    )
    assert (found.num_idle, found.decode_instance, found.num_waiting_tokens) == (1, "b", 4000)
    assert found.wait_s == pytest.approx(4.0)
    assert (found.cause, found.num_local) == ("slower", 11)
    assert found.sentence.startswith("prefill workers idle while prompts wait: 1 of m; 4000 prompt")
    assert "4.0 s" in found.sentence and found.sentence.endswith("slower (11)")


@pytest.mark.parametrize("role", ["prefill", "both"])
def test_a_worker_that_computes_is_not_idle(role: WorkerRole) -> None:
    waiting = worker("a", "decode", 4000)
    assert idle_prefill([worker("p", role), waiting])
    assert not idle_prefill([worker("p", role, 10), waiting])


def test_short_waits_other_deployments_and_decode_workers_do_not_count() -> None:
    assert not idle_prefill([worker("p", "prefill"), worker("a", "decode", 900)])
    assert not idle_prefill([worker("p", "prefill", deployment="x"), worker("a", "decode", 4000)])
    assert not idle_prefill([worker("b", "decode"), worker("a", "decode", 4000)])
    assert not idle_prefill([])


def test_where_no_costs_are_known_any_request_that_waits_counts() -> None:
    idle = worker("p", "prefill", costs=None)
    assert not idle_prefill([idle, worker("a", "decode", costs=None)])
    [found] = idle_prefill([idle, worker("a", "decode", costs=None, num_waiting=1)])
    assert (found.wait_s, found.cause, found.num_local) == (0.0, "", 0)
    assert "s for the next" not in found.sentence and "most" not in found.sentence
