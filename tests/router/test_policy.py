import random
from collections import Counter
from typing import get_args

import numpy as np
import pytest

from tandem.router.config import RouterConfig
from tandem.router.decision import Compared, RoutingDecision
from tandem.router.policy import POLICIES, Router
from tandem.runtime.wire.cluster_messages import KvEvent, LoadReport
from tandem.runtime.wire.messages import MAX_ROUTED

HASHES = [bytes([byte]) * 16 for byte in range(10)]


def router(**fields: object) -> Router:
    return Router(RouterConfig.model_validate(fields), rng=random.Random(1))


def report(who: str, used: int = 0, waiting_tokens: int = 0, num_running: int = 0) -> LoadReport:
    return LoadReport(who, "e", "decode", num_running, 0, waiting_tokens, 1000, 1000 - used, 0)


def test_the_only_instance_is_chosen_without_ado() -> None:
    decision = router().choose(["a"], [], 5)
    assert decision == RoutingDecision("a", 0, "the only instance")


def test_the_instance_with_the_prefix_is_chosen() -> None:
    chosen = router()
    chosen.index.apply(KvEvent("b", "e", 1, stored=HASHES[:6]))
    decision = chosen.choose(["a", "b"], HASHES, 10)
    assert (decision.instance_id, decision.num_overlap_blocks) == ("b", 6)
    assert "overlap 6/10" in decision.reason


def test_an_instance_that_is_named_is_chosen_and_compared_with_the_others() -> None:
    chosen = router()
    chosen.index.apply(KvEvent("b", "e", 1, stored=HASHES[:6]))
    assert all(chosen.choose(["a", "b"], HASHES, 10, named="a").instance_id == "a" for _ in "1234")
    decision = chosen.choose(["a", "b"], HASHES, 10, named="b")
    assert (decision.instance_id, decision.num_overlap_blocks) == ("b", 6)
    assert decision.reason.endswith("named by the endpoint picker")
    in_turn = router(policy="round_robin")
    assert [in_turn.choose(["a", "b"], [], 1, named="b").instance_id for _ in "12"] == ["b", "b"]


def test_an_instance_that_leaves_takes_its_blocks_and_its_load_along() -> None:
    chosen = router()
    chosen.index.apply(KvEvent("b", "e", 1, stored=HASHES[:6]))
    chosen.update_load(report("b", used=7))
    assert chosen.heeds_prefix(["a", "b"])
    chosen.remove_instance("b")
    assert not chosen.heeds_prefix(["a", "b"]) and chosen.index.num_entries == 0
    places = Counter(chosen.choose(["a", "b"], HASHES, 10).instance_id for _ in range(20))
    assert len(places) == 2, "both are alike"


def test_the_weight_decides_between_prefix_and_load() -> None:
    for weight, instance_id in ((1.0, "a"), (2.0, "b")):
        chosen = router(overlap_weight=weight)
        chosen.index.apply(KvEvent("b", "e", 1, stored=HASHES[:6]))
        chosen.update_load(report("b", used=7))
        assert chosen.choose(["a", "b"], HASHES, 10).instance_id == instance_id
    blind = router(overlap_weight=0.0)
    blind.index.apply(KvEvent("b", "e", 1, stored=HASHES))
    blind.update_load(report("b", used=1))
    assert blind.choose(["a", "b"], HASHES, 10).instance_id == "a"


def test_a_prefix_is_heeded_where_one_of_several_holds_blocks() -> None:
    chosen, blind = router(), router(overlap_weight=0.0)
    for each in (chosen, blind):
        assert not each.heeds_prefix(["a", "b"])
        each.index.apply(KvEvent("b", "e", 1, stored=HASHES[:1]))
        each.index.apply(KvEvent("c", "e", 1))
    assert chosen.heeds_prefix(["a", "b"])
    assert not chosen.heeds_prefix(["b"])
    assert not chosen.heeds_prefix(["a", "c"])
    assert not blind.heeds_prefix(["a", "b"])
    chosen.index.apply(KvEvent("b", "e", 2, removed=HASHES[:1]))
    assert not chosen.heeds_prefix(["a", "b"])


def test_by_round_robin_instances_come_in_turn_whatever_they_hold() -> None:
    chosen = router(policy="round_robin")
    chosen.index.apply(KvEvent("b", "e", 1, stored=HASHES[:6]))
    chosen.update_load(report("c", used=900, waiting_tokens=640))
    assert not chosen.heeds_prefix(["a", "b", "c"])
    ids = ["c", "a", "b"]
    assert [chosen.choose(ids, [], 10).instance_id for _ in range(6)] == ["a", "b", "c"] * 2
    assert chosen.choose(["c", "b"], [], 10).instance_id == "b"
    assert chosen.choose(ids, [], 10) == RoutingDecision("c", 0, "in turn; 1 of 3")


def test_a_queue_of_prompts_counts_as_load() -> None:
    chosen = router()
    chosen.update_load(report("a", waiting_tokens=64), block_size=16)
    assert chosen.choose(["a", "b"], [], 1).instance_id == "b"


def test_a_finished_request_is_no_load_any_more() -> None:
    chosen = router()
    for number in range(3):
        decision = RoutingDecision("a", 0, "")
        chosen.started(f"r{number}", decision, 4)
        chosen.prefilled(f"r{number}")
    assert chosen.choose(["a", "b"], [], 1).instance_id == "b"
    for number in range(3):
        chosen.finished(f"r{number}")
        chosen.finished(f"r{number}")  # again: nothing
    chosen.started("s", RoutingDecision("b", 0, ""), 1)
    assert chosen.choose(["a", "b"], [], 1).instance_id == "a"


def test_a_report_is_not_counted_on_top_of_our_own_requests() -> None:
    chosen = router()
    chosen.started("r", RoutingDecision("a", 0, ""), 10)
    chosen.prefilled("r")
    chosen.update_load(report("a", used=10))  # the same ten blocks
    chosen.update_load(report("b", used=11))
    assert chosen.choose(["a", "b"], [], 1).instance_id == "a"


def burst(chosen: Router, name: str, num_requests: int) -> Counter[str]:
    """Requests of four blocks, sent and prefilled; where they went."""
    where: Counter[str] = Counter()
    for number in range(num_requests):
        decision = chosen.choose(["a", "b"], [], 4)
        chosen.started(f"{name}{number}", decision, 4)
        where[decision.instance_id] += 1
    for number in range(num_requests):
        chosen.prefilled(f"{name}{number}")
    return where


def finish(chosen: Router, name: str, num_requests: int) -> None:
    for number in range(num_requests):
        chosen.finished(f"{name}{number}")


def test_a_burst_is_shared_also_when_the_last_reports_are_of_the_one_before() -> None:
    chosen = router()
    assert burst(chosen, "first", 16) == {"a": 8, "b": 8}
    chosen.update_load(report("a", used=8 * 4 + 8 * 2, num_running=8))  # the answers begin
    chosen.update_load(report("b", used=8 * 4 + 8 * 9, num_running=8))  # and end
    assert burst(chosen, "behind", 7)["a"] == 7
    finish(chosen, "behind", 7)
    finish(chosen, "first", 16)
    assert burst(chosen, "second", 16) == {"a": 8, "b": 8}


def test_only_the_end_of_what_was_reported_lowers_a_report() -> None:
    chosen = router()

    def run_on_a(name: str, num_requests: int) -> None:
        for number in range(num_requests):
            chosen.started(f"{name}{number}", RoutingDecision("a", 0, ""), 4)
            chosen.prefilled(f"{name}{number}")

    def active_blocks_of_a_are(num_blocks: int) -> None:
        for used, then in ((num_blocks - 1, "b"), (num_blocks + 1, "a")):
            chosen.update_load(report("b", used=used, num_running=1))
            assert chosen.choose(["a", "b"], [], 1).instance_id == then

    run_on_a("reported", 4)
    chosen.update_load(report("a", used=80, num_running=8))  # four are another frontend's
    active_blocks_of_a_are(80)
    run_on_a("since", 3)
    active_blocks_of_a_are(92)
    finish(chosen, "since", 3)
    active_blocks_of_a_are(80)
    finish(chosen, "reported", 2)
    active_blocks_of_a_are(60)
    finish(chosen, "reported", 4)
    active_blocks_of_a_are(40)


def test_the_blocks_of_a_worker_that_does_not_count_requests_stay_until_its_next_report() -> None:
    chosen = router()
    chosen.started("r", RoutingDecision("a", 0, ""), 4)
    chosen.update_load(report("a", used=10))
    chosen.finished("r")
    chosen.update_load(report("b", used=5))
    assert chosen.choose(["a", "b"], [], 1).instance_id == "b"
    chosen.update_load(report("a"))
    assert chosen.choose(["a", "b"], [], 1).instance_id == "a"


def test_ties_go_to_the_fewest_requests_and_then_to_chance() -> None:
    chosen = router(overlap_weight=0.0)
    chosen.started("r", RoutingDecision("a", 0, ""), 0)
    assert chosen.choose(["a", "b"], [], 0).instance_id == "b"
    free = router()
    counts = Counter(free.choose(["a", "b"], [], 0).instance_id for _ in range(200))
    assert min(counts.values()) > 50


def test_a_removed_instance_starts_from_nothing() -> None:
    chosen = router()
    chosen.update_load(report("a", used=50))
    chosen.started("r", RoutingDecision("a", 0, ""), 5)
    chosen.remove_instance("a")
    chosen.finished("r")
    chosen.update_load(report("b", used=1))
    assert chosen.choose(["a", "b"], [], 1).instance_id == "a"


def test_of_many_instances_that_were_compared_a_request_names_the_cheapest() -> None:
    first_token_s = np.arange(40, 0, -1) / 10
    names = [str(number) for number in range(40)]
    compared = Compared(names, first_token_s, first_token_s, np.ones(40, dtype=bool))
    routed = RoutingDecision("1", 0, "", compared=compared).routed
    assert routed is not None and RoutingDecision("1", 0, "", compared=routed).routed is routed
    assert routed.instance_ids == [str(number) for number in range(39, 39 - MAX_ROUTED, -1)]
    assert routed.costs_s == pytest.approx([(1 + at) / 10 for at in range(MAX_ROUTED)])


def test_each_policy_of_the_config_is_one_of_the_router() -> None:
    names = get_args(RouterConfig.model_fields["policy"].annotation)
    assert set(names) == set(POLICIES)
