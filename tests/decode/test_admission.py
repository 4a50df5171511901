"""The place of a prompt's prefill."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.decode.admission import (
    CLAIM_SLACK_MS,
    PrefillSide,
    decide,
    decide_again,
    gets_alike,
    given_up,
    gives_way,
    leaves_tickets,
    longest_local,
    may_wait_s,
    mean_tokens,
    num_missed,
    with_targets,
    without_room,
)
from tandem.decode.config import DisaggConfig, Policy
from tandem.decode.decision import Decision, PlacementCause
from tandem.decode.transfer_cost import TransferCost
from tandem.queue.limits import MAX_DEADLINE_MS
from tandem.router.predict import SHARE_TRIED, SURE_SHARE, PlaceLoad, Prediction, predict
from tandem.runtime.wire.bounds import MAX_COUNT
from tandem.runtime.wire.cluster_messages import StepCosts
from tandem.runtime.wire.messages import PrefillPlace, Targets


def side(**changes: object) -> PrefillSide:
    known = PrefillSide(num_instances=1, queue_connected=True)
    for name, value in changes.items():
        setattr(known, name, value)
    return known


def place(num_decodes: int = 0, waiting: int = 0) -> PlaceLoad:
    """A worker that takes 1 ms a prompt token."""
    costs = StepCosts((0.01, 0.0, 0.0), (0.0, 1e-3, 0.0), 0.05, 100_000, 100_000)
    return PlaceLoad(costs, num_decodes, 0, waiting)


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


@pytest.mark.parametrize("placement", [None, "local", "remote"])
def test_a_scored_prompt_is_computed_where_its_tokens_are_generated(placement: str | None) -> None:
    config = DisaggConfig(policy=Policy.ALWAYS_REMOTE)
    decision = decide(config, 5000, side(), placement=placement, prompt_logprobs=True)
    assert (decision.place, decision.cause) == ("local", PlacementCause.PROMPT_LOGPROBS)
    assert "log probabilities" in decision.reason


def test_always_means_always() -> None:
    local = DisaggConfig(policy=Policy.ALWAYS_LOCAL)
    remote = DisaggConfig(policy=Policy.ALWAYS_REMOTE)
    assert decide(local, 100_000, side()).place == "local"
    assert decide(remote, 1, side(num_queued_jobs=99)).place == "remote"


ADAPTIVE = THRESHOLD.model_copy(update={"policy": Policy.ADAPTIVE})


def test_the_length_decides_where_no_cost_is_known() -> None:
    """No state of not knowing keeps prompts here for ever."""
    assert decide(ADAPTIVE, 50, side(here=place(), others=[place()])).cause is PlacementCause.SHORT
    for others in ([], [place()]):
        long, short = (decide(ADAPTIVE, num, side(others=others)) for num in (500, 50))
        assert (long.place, long.cause) == ("remote", PlacementCause.UNMEASURED)
        assert short.place == "local"
        assert long.reason == "uncached 500 > max_local_prefill_length 100; no step cost is known"


def test_prompts_stay_where_no_other_worker_reports() -> None:
    decision = decide(ADAPTIVE, 500, side(here=place()))
    assert (decision.place, decision.cause) == ("local", PlacementCause.SILENT)


@pytest.mark.parametrize("policy", [Policy.ALWAYS_REMOTE, Policy.THRESHOLD, Policy.ADAPTIVE])
@pytest.mark.parametrize("placement", ["remote", None])
def test_no_prompt_is_sent_where_every_worker_has_fallen_silent(
    policy: Policy, placement: PrefillPlace | None
) -> None:
    config = THRESHOLD.model_copy(update={"policy": policy})
    silent = side(num_instances=2, num_silent=2, here=place(), others=[place()])
    decision = decide(config, 500, silent, placement=placement)
    assert (decision.place, decision.cause) == ("local", PlacementCause.SILENT)
    if placement or policy is not Policy.ADAPTIVE:
        one_silent = dataclasses.replace(silent, num_silent=1)
        assert decide(config, 500, one_silent, placement=placement).place == "remote"


@pytest.mark.parametrize(
    ("other", "is_idle"), [(place(), True), (place(1), False), (place(0, 9), False)]
)
def test_an_idle_place_that_seems_worse_is_tried_now_and_then(
    other: PlaceLoad, is_idle: bool
) -> None:
    known = side(here=place(), others=[other])
    assert decide(ADAPTIVE, 500, known, drawn=SHARE_TRIED).place == "local"
    tried = decide(ADAPTIVE, 500, known, drawn=SHARE_TRIED / 2)
    assert (tried.cause is PlacementCause.TRIED) == is_idle
    assert tried.place == ("remote" if is_idle else "local")
    assert decide(ADAPTIVE, 50, known, drawn=0.0).place == "local", "short prompts stay"


def test_a_place_that_seems_unbearable_is_tried_seldom_and_this_one_too() -> None:
    slow = msgspec.structs.replace(place().costs, prompt_s=(0.0, 6e-3, 0.0))
    known = side(here=place(), others=[PlaceLoad(slow)])
    assert decide(ADAPTIVE, 500, known, drawn=SHARE_TRIED / 2).place == "local"
    assert decide(ADAPTIVE, 500, known, drawn=SHARE_TRIED / 20).place == "remote"
    known = side(here=PlaceLoad(slow), others=[place()])
    assert decide(ADAPTIVE, 500, known, drawn=SHARE_TRIED / 2).place == "remote"
    assert decide(ADAPTIVE, 500, known, drawn=SHARE_TRIED / 20).place == "local"


def test_adaptive_goes_where_the_prompt_is_ready_sooner() -> None:
    decision = decide(ADAPTIVE, 500, side(here=place(waiting=500), others=[place()]))
    assert (decision.place, decision.cause) == ("remote", PlacementCause.FASTER)
    assert (decision.local_ms, decision.remote_ms) == pytest.approx((1000.0, 505.0), rel=1e-3)
    decision = decide(ADAPTIVE, 500, side(here=place(), others=[place(waiting=500)]))
    assert (decision.place, decision.cause) == ("local", PlacementCause.SLOWER)
    decision = decide(ADAPTIVE, 500, side(here=place(), others=[place()]))
    assert decision.cause is PlacementCause.SLOWER  # equal, but for the transfer


def test_a_decision_has_the_predictions_of_all_places_in_milliseconds() -> None:
    known = side(here=place(2, 500), others=[place(1, 700)], num_ticket_tokens=40)
    decision = decide(ADAPTIVE, 500, known, num_cached_tokens=100)
    local = predict(place(2, 500), 500, 100)
    remote = predict(place(1, 740), 600, transfer_s=TransferCost(0.0).seconds(500))
    assert decision.places == (local, remote)
    assert [
        decision.local_ms,
        decision.remote_ms,
        decision.local_cost_ms,
        decision.remote_cost_ms,
    ] == [
        each * 1e3
        for each in (local.first_token_s, remote.first_token_s, local.cost_s, remote.cost_s)
    ]
    assert decision.predicted_ms == decision.local_ms
    assert msgspec.structs.replace(decision, place="remote").predicted_ms == decision.remote_ms
    by_length = decide(THRESHOLD, 500, known, num_cached_tokens=100)
    assert (by_length.local_ms, by_length.places) == (decision.local_ms, (local,))
    unknown = decide(THRESHOLD, 500, side())
    assert (unknown.local_ms, unknown.places) == (0.0, ())


def test_adaptive_counts_the_delay_of_running_answers() -> None:
    busy = place(num_decodes=8)
    assert decide(ADAPTIVE, 500, side(here=busy, others=[place()])).place == "remote"
    assert decide(ADAPTIVE, 500, side(here=busy, others=[busy])).place == "local"
    assert decide(ADAPTIVE, 500, side(here=busy, others=[busy, place()])).place == "remote"


def test_what_was_just_placed_counts_for_the_next_prompt() -> None:
    busy = side(here=place(waiting=500), others=[place()])
    assert decide(ADAPTIVE, 500, busy).place == "remote"
    busy.num_ticket_tokens = 600
    assert decide(ADAPTIVE, 500, busy).place == "local"
    busy.others = [place(), place()]
    assert decide(ADAPTIVE, 500, busy).place == "remote"


@pytest.mark.parametrize(
    ("num_tickets", "num_ticket_tokens", "waiting", "own", "context", "expected"),
    [
        (4, 800, 500, 200, 60_000, (900 + 200, 100_000 * (1 + 200 / 900))),  # 400 in tickets of 200
        (0, 20, 0, 0, 0, (10, 10 * 10)),  # in one ticket that is not counted yet
        (1, 0, 2, 2, 90, (2 + 2, 2 * 90)),
    ],
)
def test_attention_of_tickets_and_of_own_prompts_counts_as_their_tokens_do(
    num_tickets: int,
    num_ticket_tokens: int,
    waiting: int,
    own: int,
    context: int,
    expected: tuple[int, float],
) -> None:
    costs = StepCosts((0.01, 0.0, 0.0), (0.0, 1e-3, 1e-5), 0.05, 100_000, 100_000)
    here = PlaceLoad(costs)
    busy = PlaceLoad(costs, 0, 0, waiting, "busy", own, context)
    known = side(
        num_instances=2,
        here=here,
        others=[busy, PlaceLoad(costs, instance_id="idle")],
        num_queued_jobs=num_tickets,
        num_ticket_tokens=num_ticket_tokens,
    )
    found = decide(ADAPTIVE, 500, known).places[1]
    num_tokens, positions = expected
    assert found.instance_id == "busy"
    assert found.wait_s == pytest.approx(num_tokens * 1e-3 + positions * 1e-5)


def test_a_worker_with_prompts_of_its_own_must_be_better_by_its_queue_alone() -> None:
    def decided(waiting_here: int, there: PlaceLoad) -> str:
        here = place(num_decodes=4, waiting=waiting_here)
        return decide(ADAPTIVE, 1000, side(here=here, others=[there])).place

    def busy(waiting: int, **changes: object) -> PlaceLoad:
        return msgspec.structs.replace(place(waiting=waiting), num_own_tokens=waiting, **changes)

    assert decided(1000, place(waiting=900)) == "remote"  # tickets: it takes them in turn
    assert decided(1000, busy(900)) == "local"
    assert decided(3000, busy(900)) == "remote"
    assert decided(1000, busy(900, costs=StepCosts((0, 0, 0), (0, 1e-5, 0), 1, 9, 9))) == "local"


def test_with_a_target_a_worker_with_prompts_of_its_own_is_judged_by_its_own_costs() -> None:
    costs = msgspec.structs.replace(place().costs, has_target=True)
    here = msgspec.structs.replace(place(num_decodes=4, waiting=1000), costs=costs)
    faster = StepCosts((0, 0, 0), (0, 1e-5, 0), 1, 9, 9, has_target=True)
    there = msgspec.structs.replace(place(waiting=900), num_own_tokens=900, costs=faster)
    assert decide(ADAPTIVE, 1000, side(here=here, others=[there])).place == "remote"
    there = msgspec.structs.replace(place(waiting=5000), num_own_tokens=5000, costs=costs)
    assert decide(ADAPTIVE, 1000, side(here=here, others=[there])).place == "local"


def test_prompts_of_its_own_count_twice_at_a_worker_that_takes_tickets() -> None:
    here, tickets = place(waiting=1000), place(waiting=700)
    assert decide(ADAPTIVE, 1000, side(here=here, others=[tickets])).place == "remote"
    own = msgspec.structs.replace(tickets, num_own_tokens=700)
    assert decide(ADAPTIVE, 1000, side(here=here, others=[own])).place == "local"


def test_a_ticket_waits_as_long_as_the_prompt_would_have_waited() -> None:
    decision = decide(ADAPTIVE, 500, side(here=place(waiting=500), others=[place()]))
    assert decision.claim_timeout_ms == pytest.approx(500 + CLAIM_SLACK_MS, rel=1e-3)
    decision = decide(ADAPTIVE, 500, side(here=place(waiting=10**6), others=[place()]))
    assert decision.claim_timeout_ms == ADAPTIVE.claim_timeout_ms


def test_a_prompt_that_cannot_go_away_or_comes_back_is_computed_here() -> None:
    away = decide(THRESHOLD, 500, side())
    kept = without_room(away)
    assert (kept.place, kept.cause, kept.num_uncached) == ("local", PlacementCause.NO_BLOCKS, 500)
    back = given_up("link down")
    assert (back.place, back.reason) == ("local", "remote failed: link down")


def waits_on(
    config: DisaggConfig, num_uncached: int, known: PrefillSide, waited_ms: float = 0
) -> bool:
    again = decide_again(config, num_uncached, known, waited_ms=waited_ms)
    return again.place == "remote" and again.is_predicted


def test_a_ticket_goes_on_waiting_while_another_place_is_predicted_to_be_better() -> None:
    waits = side(here=place(waiting=2000), others=[place()], num_queued_jobs=2)
    waits.num_ticket_tokens = 500 + 1000  # its own tokens, and those of another ticket
    assert waits_on(ADAPTIVE, 500, waits)
    assert (waits.num_queued_jobs, waits.num_ticket_tokens) == (2, 1500)
    waits.num_queued_jobs = 30  # a wait is predicted by tokens, not by jobs
    assert waits_on(ADAPTIVE, 500, waits)
    waits.num_ticket_tokens = 500 + 2000
    assert not waits_on(ADAPTIVE, 500, waits)
    waits.num_ticket_tokens, waits.others = 500, []  # no other worker has reported lately
    assert not waits_on(ADAPTIVE, 500, waits)


def test_a_ticket_that_waits_has_less_time_left_to_its_target() -> None:
    config = ADAPTIVE.model_copy(update={"ttft_target_ms": 1000.0})
    # of 700 ms that are sure 650 here, which costs eight answers half as much, and 665 there
    known = side(here=place(num_decodes=8), others=[place(waiting=160)], num_ticket_tokens=500)
    assert waits_on(config, 500, known)
    assert not waits_on(config, 500, known, waited_ms=60)  # here alone keeps the target
    assert waits_on(config, 500, known, waited_ms=400)  # neither place does


@pytest.mark.parametrize("policy", [Policy.THRESHOLD, Policy.ALWAYS_REMOTE])
def test_no_ticket_goes_on_waiting_without_a_prediction(policy: Policy) -> None:
    config = ADAPTIVE.model_copy(update={"policy": policy})
    known = side(here=place(waiting=2000), others=[place()], num_queued_jobs=1)
    assert decide(config, 500, known).place == "remote"
    assert not waits_on(config, 500, known)


@pytest.mark.parametrize("num_uncached", [50, 500])
def test_a_place_that_keeps_a_target_beats_a_cheaper_one(num_uncached: int) -> None:
    busy = place(num_decodes=1)
    waits = place(waiting=2000)
    assert decide(ADAPTIVE, num_uncached, side(here=busy, others=[waits])).place == "local"
    config = ADAPTIVE.model_copy(update={"itl_target_ms": 20.0})
    decision = decide(config, num_uncached, side(here=busy, others=[waits]))
    assert (decision.place, decision.cause) == ("remote", PlacementCause.TARGET)
    config = with_targets(config, Targets(ttft_ms=1000.0))  # the request's own, beside the other
    assert (config.ttft_target_ms, config.itl_target_ms) == (1000.0, 20.0)
    assert with_targets(config, None) is config
    assert decide(config, num_uncached, side(here=busy, others=[waits])).place == "local"


@pytest.mark.parametrize("drawn", [0.0, 1.0])
def test_a_short_prompt_goes_where_its_first_token_keeps_the_target(drawn: float) -> None:
    config = ADAPTIVE.model_copy(update={"ttft_target_ms": 1000.0})
    known = side(here=place(waiting=2000), others=[place()])
    decision = decide(config, 50, known, drawn=drawn)
    assert (decision.place, decision.cause) == ("remote", PlacementCause.TARGET)


def test_a_reason_names_the_numbers_that_were_compared() -> None:
    assert decide(THRESHOLD, 37, side()).reason == "uncached 37 <= max_local_prefill_length 100"


def with_target(load: PlaceLoad) -> PlaceLoad:
    return msgspec.structs.replace(load, costs=msgspec.structs.replace(load.costs, has_target=True))


@pytest.mark.parametrize(
    ("here", "others", "leaves"),
    [
        (with_target(place(num_decodes=4)), [place()], True),
        (with_target(place(num_decodes=4)), [place(num_decodes=3), place()], True),
        (place(num_decodes=4), [place(num_decodes=2)], True),
        (place(num_decodes=4), [place(num_decodes=3)], False),  # hardly less
        (with_target(place(num_decodes=4)), [place(num_decodes=2)], False),  # both keep it
        (with_target(place(num_decodes=4)), [place(waiting=10_000)], False),  # busy with tickets
        (with_target(place()), [place()], False),
        (with_target(place(waiting=100)), [place()], False),  # hardly less
        (with_target(place(num_decodes=4)), [], False),
        (place(num_decodes=4), [place()], True),  # without a target too
    ],
)
def test_tickets_are_left_to_workers_where_they_cost_clearly_less(
    here: PlaceLoad, others: list[PlaceLoad], leaves: bool
) -> None:
    assert leaves_tickets(here, others, 1024) is leaves


def test_long_tickets_are_left_to_workers_that_would_first_compute_others() -> None:
    """Each of the answers here would wait for the whole prompt, which waits once there."""
    here, others = place(num_decodes=8), [place(waiting=10_000)]
    assert not leaves_tickets(here, others, 500)
    assert leaves_tickets(here, others, 4000)


def test_the_mean_length_of_tickets_follows_the_last_ones() -> None:
    assert mean_tokens(1000.0, 1800) == 1100.0
    assert mean_tokens(1100.0, 300) == 1000.0


def test_a_worker_without_known_costs_gets_as_many_requests_as_any() -> None:
    assert gets_alike(None, place())
    assert gets_alike(place(num_decodes=2), place())
    assert not gets_alike(place(num_decodes=3), place())


@pytest.mark.parametrize("placement", [None, "remote"])
def test_a_long_prompt_stays_where_no_worker_takes_tickets(placement: PrefillPlace | None) -> None:
    decision = decide(THRESHOLD, 101, side(num_instances=0), placement=placement)
    assert (decision.place, decision.cause) == ("local", PlacementCause.NO_PREFILL_WORKER)


@pytest.mark.parametrize(
    ("changes", "num_tokens", "waited_ms", "gives"),
    [
        ({"ttft_target_ms": 1000.0}, 100, 2000.0, True),
        ({"ttft_target_ms": 1000.0}, 100, 0.0, False),
        ({"ttft_target_ms": 1000.0}, 1_000_000, 0.0, True),  # computing alone takes longer
        ({}, 100, 2000.0, False),  # without a target
        ({"ttft_target_ms": 1000.0, "policy": Policy.THRESHOLD}, 100, 2000.0, False),
    ],
)
def test_a_ticket_gives_way_once_its_target_is_lost(
    changes: dict[str, object], num_tokens: int, waited_ms: float, gives: bool
) -> None:
    config = ADAPTIVE.model_copy(update=changes)
    assert gives_way(config, place(), num_tokens, waited_ms) is gives


def test_a_ticket_gives_way_where_prompts_that_come_first_cost_its_target() -> None:
    config = ADAPTIVE.model_copy(update={"ttft_target_ms": 1000.0})
    assert gives_way(config, place(waiting=1_000_000), 100, 0.0)
    assert not gives_way(config, place(waiting=100), 100, 700.0)
    assert gives_way(config, place(waiting=100), 100, 810.0)


@pytest.mark.parametrize(
    ("targets", "waited_s", "expected_s"),
    [
        ((2000.0, 50.0), 0.4, SURE_SHARE * 2.0 - 0.4),
        ((2000.0, 50.0), 5.0, 0.0),
        ((None, 50.0), 0.0, 0.0),
        ((2000.0, None), 0.0, 0.0),
    ],
)
def test_a_first_token_waits_for_its_blocks_where_both_targets_are_set(
    targets: tuple[float | None, float | None], waited_s: float, expected_s: float
) -> None:
    config = DisaggConfig(ttft_target_ms=targets[0], itl_target_ms=targets[1])
    assert may_wait_s(config, waited_s) == pytest.approx(expected_s)


def test_a_target_is_missed_by_what_does_not_surely_keep_it() -> None:
    config = DisaggConfig(ttft_target_ms=1000.0, itl_target_ms=50.0)
    kept = Prediction(0.25, 0.25, SURE_SHARE - 0.51, 1, 1.0, 0.05, "worker")
    assert num_missed(config, kept) == 0
    assert num_missed(config, msgspec.structs.replace(kept, wait_s=0.27)) == 1
    assert num_missed(config, msgspec.structs.replace(kept, wait_s=0.27, step_s=0.06)) == 2


def test_of_two_places_neither_of_which_surely_keeps_a_target_the_sooner_one_counts() -> None:
    """The first token has the same share of its target in both places."""
    config = ADAPTIVE.model_copy(update={"ttft_target_ms": 1000.0})
    known = side(here=place(num_decodes=1, waiting=350), others=[place(waiting=250)])
    decision = decide(config, 500, known)  # 950 ms here, 755 there: both within the target
    assert (decision.place, decision.cause) == ("remote", PlacementCause.FASTER)


@pytest.mark.parametrize(
    ("num_here", "num_there", "expected"), [(0, 0, True), (2, 0, True), (3, 0, False), (9, 4, True)]
)
def test_frontends_send_alike_to_workers_with_about_as_many_answers(
    num_here: int, num_there: int, expected: bool
) -> None:
    """Where few workers hold all answers, the others get no part of a burst."""
    assert gets_alike(place(num_here), place(num_there)) is expected


@pytest.mark.parametrize(
    ("timeout_ms", "num_tokens", "expected_ms"), [(1000, 100, 1500), (3_600_000, 100, 3_600_000)]
)
def test_a_handoff_may_take_no_longer_than_the_queue_takes_tickets_for(
    timeout_ms: int, num_tokens: int, expected_ms: int
) -> None:
    config = DisaggConfig(handoff_timeout_ms=timeout_ms, handoff_timeout_ms_per_token=5.0)
    assert config.handoff_timeout_of(num_tokens) == expected_ms
    assert expected_ms <= MAX_DEADLINE_MS


def test_every_cause_has_a_sentence_and_is_explained_to_users() -> None:
    root = Path(__file__).parents[2]
    table = (root / "docs/metrics.md").read_text()
    page = (root / "frontend/ui/page/panels.js").read_text()
    for cause in PlacementCause:
        decision = Decision("local", cause, Policy.THRESHOLD, 37, 2, 1000, 1.25, 2.5, detail="lost")
        assert decision.reason and "{" not in decision.reason
        assert f"| `{cause}` |" in table
        assert f"\n  {cause}: " in page


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"policy": Policy.ALWAYS_LOCAL}, MAX_COUNT),
        ({"policy": Policy.ALWAYS_REMOTE}, 0),
        ({"policy": Policy.THRESHOLD, "itl_target_ms": 20.0}, 100),
        ({"policy": Policy.ADAPTIVE}, 100),
        ({"policy": Policy.ADAPTIVE, "itl_target_ms": 20.0}, 0),
        ({"policy": Policy.ADAPTIVE, "ttft_target_ms": 2000.0}, 0),
    ],
)
def test_frontends_hear_which_prompts_are_never_computed_elsewhere(
    changes: dict[str, Any], expected: int
) -> None:
    config = THRESHOLD.model_copy(update=changes)
    assert longest_local(config) == expected
    there = side(here=place(num_decodes=100), others=[place()])  # by far the better place
    assert decide(config, min(expected, 10**6), there).place == "local" or not expected
    if expected < MAX_COUNT:
        assert decide(config, expected + 500, there).place == "remote"
