"""The choice of a worker by prediction, for fleets and loads of many kinds."""

import itertools
import random
from collections import Counter
from typing import NamedTuple, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tandem.router.by_cost import MARGIN
from tandem.router.config import RouterConfig
from tandem.router.decision import RoutingDecision
from tandem.router.load_table import LoadTable
from tandem.router.policy import Router
from tandem.router.predict import MAX_SLOWNESS, SHARE_TRIED, SURE_SHARE, PlaceLoad, predict
from tandem.runtime.wire.cluster_messages import KvEvent, LoadReport, StepCosts, WorkerRole

BLOCK_SIZE = 16
HASHES = [bytes([byte]) * 16 for byte in range(100)]
COSTS = StepCosts((0.01, 0.001, 1e-7), (0.005, 0.0001, 1e-9), 0.1, 2048, 512)


def scaled(factor: float, costs: StepCosts = COSTS) -> StepCosts:
    def times(part: tuple[float, float, float]) -> tuple[float, float, float]:
        return part[0] * factor, part[1] * factor, part[2] * factor

    return msgspec.structs.replace(
        costs, decode_s=times(costs.decode_s), prompt_s=times(costs.prompt_s)
    )


def report(
    name: str, costs: StepCosts | None = COSTS, num_decodes: int = 0, num_waiting_tokens: int = 0
) -> LoadReport:
    """The load of a worker that takes tickets too if it has a target."""
    context = 100 * num_decodes
    role: WorkerRole = "both" if costs is not None and costs.has_target else "decode"
    return LoadReport(
        name, "e", role, num_decodes, 0, num_waiting_tokens, 1000, 900, 0, num_decodes, context,
        costs,
    )  # fmt: skip


def router(*reports: LoadReport, weight: float = 1.0) -> Router:
    made = Router(RouterConfig(overlap_weight=weight), random.Random(1))
    for each in reports:
        made.update_load(each, BLOCK_SIZE)
    return made


def send(chosen: Router, names: list[str], num_requests: int, num_in_flight: int) -> Counter[str]:
    """Send requests, half of those in flight before their first token; return where they went.

    The first ones, until as many are in flight as later on, are not counted.
    """
    rng = random.Random(num_in_flight)
    where: Counter[str] = Counter()
    waiting: list[str] = []
    running: list[str] = []
    for number in range(-2 * num_in_flight, num_requests):
        decision = chosen.choose(names, [], 10)
        chosen.started(str(number), decision, 10)
        where[decision.instance_id] += number >= 0
        waiting.append(str(number))
        if len(waiting) > num_in_flight // 2:
            running.append(waiting.pop(rng.randrange(len(waiting))))
            chosen.prefilled(running[-1])
        if len(running) > num_in_flight // 2:
            chosen.finished(running.pop(rng.randrange(len(running))))
    for request_id in waiting + running:
        chosen.finished(request_id)
    return where


coefficients = st.floats(0, 0.01)
learned = st.builds(
    StepCosts,
    st.tuples(coefficients, coefficients, st.floats(0, 1e-5)),
    st.tuples(coefficients, coefficients, st.floats(0, 1e-5)),
    st.floats(0, 1),
    st.integers(1, 4096),
    st.integers(1, 4096),
)
loads = st.tuples(st.none() | learned, st.integers(0, 100), st.integers(0, 10_000))


@settings(max_examples=50)
@given(st.lists(loads, min_size=1, max_size=6), st.data())
def test_only_candidates_are_chosen_and_the_same_ones_again(
    reported: list[tuple[StepCosts | None, int, int]], data: st.DataObject
) -> None:
    names = [str(number) for number in range(len(reported))]
    candidates = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    first, second = (
        router(*(report(name, *load) for name, load in zip(names, reported, strict=True)))
        for _ in range(2)
    )
    for holder in names:
        for each in (first, second):
            each.index.apply(KvEvent(holder, "e", 1, stored=HASHES[: 3 * int(holder)]))
    decision = first.choose(candidates, HASHES, 100)
    assert decision.instance_id in candidates
    again = second.choose(candidates, HASHES, 100)
    assert replace(decision, compared=None) == replace(again, compared=None)
    if (routed := decision.routed) is not None:
        assert routed.instance_ids == candidates
        chosen = routed.instance_ids.index(decision.instance_id)
        assert routed.first_token_s[chosen] * 1e3 == pytest.approx(decision.predicted_ms)
        assert routed.costs_s[chosen] * 1e3 == pytest.approx(decision.cost_ms)
        assert f"first token in {decision.predicted_ms:.1f} ms" in decision.reason
        among = f"1 of {len(candidates)}, overlap {decision.num_overlap_blocks}/100"
        assert f"delays {decision.cost_ms:.1f}; {among}" in decision.reason


class Drawn(random.Random):
    """Shares that are drawn in turn; ties go by chance as ever."""

    def __init__(self, *numbers: float) -> None:
        super().__init__(1)
        self.numbers = itertools.cycle(numbers)

    def random(self) -> float:
        return next(self.numbers)

    def getrandbits(self, k: int, /) -> int:
        return super().getrandbits(k)


class Place(NamedTuple):
    """A worker by its report, and prompts of 20 blocks that were sent there since."""

    num_decodes: int
    num_waiting_tokens: int
    overlap: int  # of the next prompt
    sent: int
    num_prefilled: int  # of these
    num_free_blocks: int


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.builds(
            Place,
            st.integers(0, 50),
            st.integers(0, 5000),
            st.integers(0, 99),
            st.integers(0, 5),
            st.integers(0, 2),
            st.integers(100, 200) | st.just(900),
        ),
        min_size=1,
        max_size=4,
    ),
    st.floats(0, 2),
    st.sampled_from([None, 0.2, 1.0]),
    st.sampled_from([0.0, 0.5]),
)
def test_the_cheapest_by_prediction_is_chosen_of_those_with_room_and_time(
    places: list[Place], weight: float, target_s: float | None, hidden_share: float
) -> None:
    """The costs compared are those of `predict`, by which workers decide too."""
    costs = replace(COSTS, hidden_share=hidden_share)
    names = "abcd"[: len(places)]
    chosen, expected = router(weight=weight), []
    chosen.rng = Drawn(1.0)
    for name, place in zip(names, places, strict=True):
        load = report(name, costs, place.num_decodes, place.num_waiting_tokens)
        waiting_context = place.num_waiting_tokens * 50
        load = replace(load, num_free_blocks=place.num_free_blocks, waiting_context=waiting_context)
        chosen.update_load(load, BLOCK_SIZE)
        chosen.index.apply(KvEvent(name, "e", 1, stored=HASHES[: place.overlap]))
        for number in range(place.sent):
            chosen.started(f"{name}{number}", RoutingDecision(name, 15, ""), 20)
        for number in range(place.num_prefilled):
            chosen.prefilled(f"{name}{number}")
        num_prefilled = min(place.num_prefilled, place.sent)
        waiting = place.num_waiting_tokens // BLOCK_SIZE + 5 * (place.sent - num_prefilled)
        num_decodes, length = place.num_decodes + num_prefilled, 100 if place.num_decodes else 320
        sent_tokens, num_cached = 5 * BLOCK_SIZE, 15 * BLOCK_SIZE
        positions = (place.sent - num_prefilled) * sent_tokens * (num_cached + sent_tokens / 2)
        load_there = PlaceLoad(
            costs,
            num_decodes,
            length * num_decodes,
            waiting * BLOCK_SIZE,
            waiting_context=waiting_context + positions,
        )
        # A prompt that is held there whole has its last token computed again.
        overlap = place.overlap if len(places) > 1 else 0
        num_missing = max((100 - weight * overlap) * BLOCK_SIZE, 1.0)
        expected.append(predict(load_there, cast(int, num_missing), overlap * BLOCK_SIZE))
    decision = chosen.choose(list(names), HASHES, 100, target_s)
    routed = decision.routed
    assert routed is not None and routed.instance_ids == list(names)
    assert routed.first_token_s == pytest.approx([each.first_token_s for each in expected])
    assert routed.costs_s == pytest.approx([each.cost_s for each in expected])
    at = names.index(decision.instance_id)
    free = [place.num_free_blocks - 20 * place.sent >= 100 for place in places]
    if len(places) == 1:
        assert routed.fit == free
        return
    in_time = [
        is_free and (target_s is None or first_token_s <= SURE_SHARE * target_s)
        for is_free, first_token_s in zip(free, routed.first_token_s, strict=True)
    ]
    fit = in_time if any(in_time) else free
    assert routed.fit == fit
    left = [index for index in range(len(places)) if fit[index] or not any(fit)]
    cheapest = min(left, key=routed.costs_s.__getitem__)
    assert at in left and routed.costs_s[at] <= (1 + MARGIN) * routed.costs_s[cheapest] * 1.000001
    assert decision.num_overlap_blocks == places[at].overlap >= places[cheapest].overlap
    for other in left:
        is_as_good = routed.costs_s[other] <= (1 + MARGIN) * routed.costs_s[cheapest] * 0.999999
        if is_as_good and places[other].overlap >= places[cheapest].overlap:
            assert places[at].sent <= places[other].sent


@pytest.mark.parametrize("has_target", [False, True])
def test_a_worker_whose_answers_would_miss_their_target_is_passed_over(has_target: bool) -> None:
    """79 answers take 89 of the 90 ms that a step is planned with, and one more 90."""
    costs = replace(COSTS, has_target=has_target, max_step_s=0.1)
    full, busy = report("full", costs, num_decodes=79), report("busy", costs, 10, 3000)
    chosen = router(full, busy)
    chosen.rng = Drawn(1.0)
    named = chosen.choose(["full", "busy"], [], 100, named="full").routed
    assert named is not None and named.fit == [not has_target, True]
    alone = router(full, report("other", costs, num_decodes=79))
    routed = alone.choose(["full", "other"], [], 100).routed
    assert routed is not None and routed.fit == [True, True], "none is better"


@pytest.mark.parametrize("num_in_flight", [16, 80])
def test_alike_workers_get_equal_shares_however_their_costs_were_learned(
    num_in_flight: int,
) -> None:
    rng = random.Random(num_in_flight)
    names = ["a", "b", "c", "d"]
    learned = [scaled(rng.uniform(0.98, 1.02)) for _ in names]
    chosen = router(*(report(*each) for each in zip(names, learned, strict=True)))
    rounds = [send(chosen, names, 800, num_in_flight) for _ in range(3)]
    for shares in rounds:
        assert all(abs(shares[name] / 200 - 1) < 0.15 for name in names)
    assert all(abs(sum(rounds, Counter())[name] / 600 - 1) < 0.06 for name in names)


def test_a_worker_with_costs_a_hundred_times_wrong_gets_requests_and_recovers() -> None:
    names = ["a", "b", "c", "d"]
    for wrong in (scaled(100), msgspec.structs.replace(COSTS, decode_s=scaled(100).decode_s)):
        chosen = router(report("a", wrong), *map(report, names[1:]))
        before = send(chosen, names, 400, 40)
        assert before["a"] >= 100 / MAX_SLOWNESS / 2
        assert before["b"] > before["a"]
        chosen.update_load(report("a"), BLOCK_SIZE)
        assert 180 <= send(chosen, names, 800, 40)["a"] <= 220


def test_a_worker_without_costs_borrows_those_of_the_median_worker() -> None:
    known = [report("a", scaled(1)), report("b", scaled(2)), report("c", scaled(3))]
    chosen = router(*known, report("d", None))
    alike = router(*known, report("d", scaled(2)))
    for names in (["a", "d"], ["d", "a", "b", "c"]):
        assert send(chosen, names, 200, 20)["d"] > 0
    for each in (chosen, alike):
        each.update_load(report("b", scaled(2), num_decodes=3), BLOCK_SIZE)
    borrowing = chosen.choose(["a", "b", "c", "d"], [], 10)
    assert borrowing.predicted_ms == alike.choose(["a", "b", "c", "d"], [], 10).predicted_ms
    chosen.update_load(report("d", scaled(0.1)), BLOCK_SIZE)
    assert send(chosen, ["b", "d"], 200, 20)["d"] > 125


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_every_prompt_has_a_token_to_compute(names: list[str]) -> None:
    decision = router(*map(report, names)).choose(names, [], 0)
    assert decision.predicted_ms == pytest.approx(predict(PlaceLoad(COSTS), 1).first_token_s * 1e3)


def test_blocks_decide_where_no_worker_has_learned_costs() -> None:
    chosen = router(report("a", None), report("b", None))
    decision = chosen.choose(["a", "b"], [], 10)
    assert decision.reason == "cost 110 of 2, overlap 0/10" and decision.predicted_ms == 0.0


def test_the_table_keeps_no_place_of_workers_that_left() -> None:
    table = LoadTable()
    for number in range(5000):
        names = [str(number + ahead) for ahead in range(3)]
        table.arrange(names)
        assert [load.row for each in names if (load := table.get(each))] == [0, 1, 2]
        assert table._columns.shape[1] == 16
        table.remove(str(number))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_costs_that_no_worker_can_learn_are_refused(seconds: float) -> None:
    wrong = msgspec.structs.replace(COSTS, prompt_s=(0.0, seconds, 0.0))
    payload = msgspec.msgpack.encode(report("a", wrong))
    with pytest.raises(msgspec.ValidationError, match=r"\$\.costs\.prompt_s\[1\]"):
        msgspec.msgpack.decode(payload, type=LoadReport)
    none = msgspec.structs.replace(COSTS, max_tokens=0)
    with pytest.raises(msgspec.ValidationError, match="max_tokens"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(report("a", none)), type=LoadReport)


def test_an_idle_worker_that_seems_slow_is_tried_now_and_then() -> None:
    chosen = router(report("a"), report("b", scaled(100.0)))
    tried = [chosen.choose(["a", "b"], [], 10).instance_id for _ in range(2000)].count("b")
    assert 0.25 * SHARE_TRIED < tried / 2000 < SHARE_TRIED
    chosen.index.apply(KvEvent("a", "e", 1, stored=HASHES[:8]))
    assert {chosen.choose(["a", "b"], HASHES[:9], 10).instance_id for _ in range(500)} == {"a"}


@pytest.mark.parametrize(
    ("per_step_s", "is_bearable"),
    [(0.027, True), (0.0278, False)],  # 6.6 ms at the other
)
def test_a_worker_that_seems_slow_is_tried_where_it_is_no_shorter_and_bearable(
    per_step_s: float, is_bearable: bool
) -> None:
    """One that seems too slow to bear is still tried now and then, since it may seem so wrongly."""
    slow = replace(COSTS, prompt_s=(per_step_s, *COSTS.prompt_s[1:]))
    for overlaps, unbearable, is_tried in (
        ((0, 0), 0.5, is_bearable),
        ((0, 0), 0.0, True),
        ((1, 1), 0.0, True),
        ((2, 1), 0.0, False),
    ):
        chosen = router(report("a"), report("b", slow))
        chosen.rng = Drawn(0.0, unbearable)
        for name, overlap in zip("ab", overlaps, strict=True):
            chosen.index.apply(KvEvent(name, "e", 1, stored=HASHES[:overlap]))
        found = {chosen.choose(["a", "b"], HASHES, 1 + overlaps[0]).instance_id for _ in range(20)}
        assert found == ({"a", "b"} if is_tried else {"a"})


def test_of_workers_that_are_as_good_the_one_with_the_fewest_requests_is_chosen() -> None:
    chosen = router(report("a"), report("b"))
    for name in "ab":
        chosen.index.apply(KvEvent(name, "e", 1, stored=HASHES[:9]))
    chosen.started("r", RoutingDecision("a", 0, ""), 0)
    assert {chosen.choose(["a", "b"], HASHES, 100).instance_id for _ in range(50)} == {"b"}


def test_a_worker_that_stood_still_in_a_step_is_tried_with_short_prompts_too() -> None:
    paused = msgspec.structs.replace(COSTS, prompt_s=(5.0, *COSTS.prompt_s[1:]))
    chosen = router(report("a"), report("b", paused))
    assert "b" in [chosen.choose(["a", "b"], [], 1).instance_id for _ in range(10_000)]


# ---- with a target of the time between tokens ---------------------------------------------------

# A step takes 10 ms and 1 ms for each of its answers, whose context costs nothing; at most 40 ms.
TARGET = StepCosts((0.01, 0.001, 0.0), (0.005, 0.0001, 0.0), 0.04, 2048, 512, has_target=True)


def pressed(*reports: LoadReport, num_prompts: int = 10) -> Router:
    """Return a router that has just sent prompts of 0.64 s each, which have ended."""
    chosen = router(*reports)
    chosen.clock = lambda: 100.0
    for _ in range(num_prompts):
        chosen.started("sent", RoutingDecision(reports[0].instance_id, 0, ""), 400)
        chosen.finished("sent")
    return chosen


@pytest.mark.parametrize(
    ("loads", "chosen_name"),
    [
        ({"a": (TARGET, 3), "b": (TARGET, 9), "c": (TARGET, 0)}, "b"),
        ({"a": (TARGET, 23), "b": (TARGET, 0)}, "a"),  # 10 + 24 ms of 40 * 0.85
        ({"a": (TARGET, 25), "b": (TARGET, 0)}, "b"),
        ({"a": (TARGET, 9), "b": (TARGET, 16), "c": (TARGET, 8), "d": (TARGET, 0)}, "a"),  # of two
        ({"a": (TARGET, 24), "b": (TARGET, 30), "c": (TARGET, 30)}, "a"),  # the cheapest
        ({"b": (TARGET, 4), "a": (TARGET, 4)}, "b"),  # always the first, on every frontend
        ({"a": (COSTS, 3), "b": (COSTS, 0)}, "b"),  # which take no tickets
    ],
)
def test_answers_with_a_target_stand_on_as_few_workers_as_hold_them_in_time(
    loads: dict[str, tuple[StepCosts, int]], chosen_name: str
) -> None:
    chosen = pressed(*(report(name, *load) for name, load in loads.items()))
    assert chosen.choose(list(loads), [], 10).instance_id == chosen_name


def test_answers_with_a_target_spread_where_prompts_come_slowly() -> None:
    reports = report("a", TARGET, 9), report("b", TARGET, 3)
    rates = {}
    for num_prompts in (0, 1, 10):
        chosen = pressed(*reports, num_prompts=num_prompts)
        rates[num_prompts] = chosen.choose(["a", "b"], [], 10).instance_id
    # 15 of 40 ms are left for prompts with 6 answers on each, and 30 % of that asked for by two
    assert rates == {0: "b", 1: "b", 10: "a"}
    few_answers = report("a", TARGET, 1), report("b", TARGET, 0)
    chosen = pressed(*few_answers)
    assert chosen.choose(["a", "b"], [], 10).instance_id == "a", "however little they take"
    chosen = pressed(*reports)
    chosen.clock = lambda: 200.0
    assert chosen.choose(["a", "b"], [], 10).instance_id == "b", "that was long ago"


@pytest.mark.parametrize(
    ("has_target", "silence_s", "chosen_name"),
    [(False, 0.2, "a"), (False, 2.0, "b"), (True, 2.0, "a")],
)
def test_only_answers_without_a_target_spread_as_soon_as_due_prompts_stay_away(
    has_target: bool, silence_s: float, chosen_name: str
) -> None:
    """Ten prompts a second come, each of 64 ms; steps of 20 ms hardly depend on their answers."""
    costs = StepCosts((0.02, 1e-4, 0.0), (0.005, 1e-5, 0.0), 0.04, 2048, 512, has_target=has_target)
    reports = (
        msgspec.structs.replace(each, role="both")
        for each in (report("a", costs, 20), report("b", costs, 3))
    )
    chosen = pressed(*reports, num_prompts=100)
    chosen.clock = lambda: 100.0 + silence_s
    found = {chosen.choose(["a", "b"], [], 10).instance_id for _ in range(20)}
    assert found == {chosen_name}


def test_another_worker_holds_answers_where_those_that_should_have_no_blocks() -> None:
    full = msgspec.structs.replace(report("a", TARGET, 9), num_free_blocks=10)
    chosen = pressed(full, report("b", TARGET))
    assert chosen.choose(["a", "b"], [], 10).instance_id == "a"
    assert chosen.choose(["a", "b"], [], 11).instance_id == "b"
    chosen.rng = Drawn(0.0)
    found = {chosen.choose(["a", "b"], [], 10).instance_id for _ in range(20)}
    assert found == {"a"}, "the idle one is not tried"
    # the one with the most answers of those with room, though the third is the cheapest
    chosen = pressed(full, report("b", TARGET, 5), report("c", TARGET))
    assert chosen.choose(["a", "b", "c"], [], 11).instance_id == "b"


def test_answers_stand_on_as_many_workers_as_have_blocks_for_their_contexts() -> None:
    long = msgspec.structs.replace(report("a", TARGET, 9), decode_context=20_000)
    for num_blocks, chosen_name in ((2000, "a"), (1000, "b")):  # of 16 tokens
        reports = [
            msgspec.structs.replace(each, num_blocks=num_blocks, num_free_blocks=num_blocks)
            for each in (long, report("b", TARGET, 1), report("c", TARGET), report("d", TARGET))
        ]
        chosen = pressed(*reports)
        assert chosen.choose(list("abcd"), [], 10).instance_id == chosen_name


def test_answers_spread_over_workers_that_compute_no_prompts_of_others() -> None:
    busy = msgspec.structs.replace(report("a", TARGET, 9), role="decode")
    chosen = pressed(busy, msgspec.structs.replace(report("b", TARGET), role="decode"))
    assert chosen.choose(["a", "b"], [], 10).instance_id == "b"


def test_of_the_workers_that_hold_answers_one_with_the_prompt_is_chosen() -> None:
    reports = [report(name, TARGET, num) for name, num in zip("abcd", (16, 17, 0, 0), strict=True)]
    chosen = pressed(*reports)
    for name in "bc":
        chosen.index.apply(KvEvent(name, "e", 1, stored=HASHES[:9]))
    assert chosen.choose(list("abcd"), HASHES[:10], 10).instance_id == "b"
    assert chosen.choose(list("abcd"), HASHES[50:60], 10).instance_id == "a"


# ---- without a target ---------------------------------------------------------------------------

# A step of decodes takes 10 ms and 0.1 ms for each; a prompt of 400 blocks 0.64 s.
PLAIN = StepCosts((0.01, 0.0001, 0.0), (0.005, 0.0001, 0.0), 0.25, 2048, 512)


def taking(name: str, num_decodes: int = 0, **fields: object) -> LoadReport:
    return msgspec.structs.replace(report(name, PLAIN, num_decodes), role="both", **fields)


def test_answers_stand_together_where_each_gets_its_tokens_sooner_than_among_prompts() -> None:
    busy = pressed(taking("a", 19), taking("b"), num_prompts=8)  # 0.5 s of prompts a second
    assert busy.choose(["a", "b"], [], 10).instance_id == "a"
    few = pressed(taking("a", 9), taking("b"), num_prompts=14)  # 0.9 s: they wait for one another
    assert few.choose(["a", "b"], [], 10).instance_id == "b"
    calm = pressed(taking("a", 19), taking("b"), num_prompts=1)
    assert calm.choose(["a", "b"], [], 10).instance_id == "b"
    alone = pressed(taking("a", 19), taking("b"), num_prompts=30)  # one has no time for 1.9 s
    assert alone.choose(["a", "b"], [], 10).instance_id == "b"
    room = {"num_blocks": 4000, "num_free_blocks": 3000}
    # 27 ms a step, where a mix takes 18 ms / 0.55
    many = pressed(taking("a", 90, **room), taking("b", 80, **room), num_prompts=14)
    assert many.choose(["a", "b"], [], 10).instance_id == "a"
    local = msgspec.structs.replace(PLAIN, longest_local=400 * BLOCK_SIZE)
    reports = [
        msgspec.structs.replace(taking(*each), costs=local) for each in (("a", 19), ("b", 0))
    ]
    assert pressed(*reports, num_prompts=8).choose(["a", "b"], [], 10).instance_id == "b"
    slow = msgspec.structs.replace(PLAIN, decode_s=(0.001, 0.001, 0.0))  # as on a CPU
    reports = [msgspec.structs.replace(taking(*each), costs=slow) for each in (("a", 9), ("b", 8))]
    assert pressed(*reports, num_prompts=14).choose(["a", "b"], [], 10).instance_id == "b"


def test_answers_stand_on_as_many_workers_as_have_batch_rows_for_them() -> None:
    rows = {"max_num_seqs": 16, "num_running": 14}
    reports = taking("a", 14, **rows), taking("b", max_num_seqs=16), taking("c", max_num_seqs=16)
    chosen = pressed(*reports, num_prompts=14)
    where: Counter[str] = Counter()
    for number in range(14):
        decision = chosen.choose(list("abc"), [], 10)
        chosen.started(str(number), decision, 10)
        where[decision.instance_id] += 1
    assert where["a"] <= 2 and where["b"] + where["c"] >= 12


@pytest.mark.parametrize("role", ["decode", "both"])
def test_no_prompt_waits_for_a_row_or_blocks_where_another_worker_has_them(role: str) -> None:
    """The worker that is full has its prompt's prefix, and seems by far the cheapest."""
    full = [
        {"max_num_seqs": 16, "num_running": 10, "num_waiting": 6},
        {"num_free_blocks": 9},
    ]
    for fields in full:
        full_one = msgspec.structs.replace(report("a", PLAIN), role=role, **fields)
        other = msgspec.structs.replace(report("b", PLAIN, 50), role=role, max_num_seqs=64)
        chosen = router(full_one, other)
        chosen.index.apply(KvEvent("a", "e", 1, stored=HASHES[:9]))
        assert chosen.choose(["a", "b"], HASHES[:10], 10).instance_id == "b"
        assert chosen.choose(["a"], HASHES[:10], 10).instance_id == "a", "the only one waits"


def test_a_prompt_goes_where_its_first_token_comes_in_time() -> None:
    target = msgspec.structs.replace(PLAIN, ttft_target_s=0.5)
    waiting = report("a", target, 0, num_waiting_tokens=6000)  # 0.6 s, and delays nobody
    beside = report("b", target, 30)
    assert router(waiting, beside).choose(["a", "b"], [], 100).instance_id == "b"
    no_target = report("a", PLAIN, 0, num_waiting_tokens=6000), report("b", PLAIN, 30)
    assert router(*no_target).choose(["a", "b"], [], 100).instance_id == "a"
    own = router(*no_target).choose(["a", "b"], [], 100, ttft_target_s=0.5)
    assert own.instance_id == "b", "a request may have a target of its own"
    late = report("a", target, 0, num_waiting_tokens=6000), report("b", target, 500)
    assert router(*late).choose(["a", "b"], [], 200).instance_id == "a", "none keeps it"
    hardly = report("a", target, 0, num_waiting_tokens=2000), report("b", target, 30)
    assert router(*hardly).choose(["a", "b"], [], 100).instance_id == "b", "0.36 s may become 0.5"


def test_answers_that_keep_their_target_keep_no_prompt_away() -> None:
    """Long prompts do not queue at the worker with the fewest answers while another one is free."""

    def chosen(costs: StepCosts, num_waiting_tokens: int = 2000) -> str:
        waiting = report("a", costs, 0, num_waiting_tokens=num_waiting_tokens)
        beside = report("b", costs, 30)
        made = router(*(msgspec.structs.replace(each, role="decode") for each in (waiting, beside)))
        return made.choose(["a", "b"], [], 100).instance_id

    kept = msgspec.structs.replace(PLAIN, has_target=True)
    assert chosen(PLAIN) == "a" and chosen(kept) == "b"
    assert chosen(kept, 0) == "a"
    missed = msgspec.structs.replace(kept, max_step_s=0.012)  # answers alone take 13 ms a step
    assert chosen(missed) == "a"
    launched = msgspec.structs.replace(kept, prompt_floor_s=0.3)
    assert chosen(launched) == "a"


def test_the_sum_of_workers_that_take_tickets_is_that_of_each() -> None:
    """However requests, reports and candidates change meanwhile."""
    rng, now = random.Random(7), 1e6
    chosen = router(*(report(name) for name in "abcd"))
    chosen.clock = lambda: now
    table, running = chosen._loads, list[str]()
    for number in range(300):
        now += rng.random()
        names = sorted(rng.sample("abcd", rng.choice((2, 3, 4, 4, 4))))
        decision = chosen.choose(names, [], 50)
        chosen.started(str(number), decision, 50)
        running.append(str(number))
        if rng.random() < 0.7:
            chosen.finished(running.pop(rng.randrange(len(running))))
        costs = replace(COSTS, has_target=rng.random() < 0.7)
        chosen.update_load(report(rng.choice("abcd"), costs, rng.randrange(9)), BLOCK_SIZE)
        table.arrange(names)
        shares = [table.add(name).sharing() for name in names]
        sharing = table.sharing()
        assert (sharing is None) == (not any(each.num_workers for each in shares))
        if sharing is not None:
            _, num_answers, total = sharing
            assert total.num_workers == sum(each.num_workers for each in shares)
            assert total.num_answers == sum(each.num_answers for each in shares)
            assert num_answers.tolist() == [table.add(name).num_answers for name in names]
            assert total.context == pytest.approx(sum(each.context for each in shares))
            assert total.rates_at(now) == pytest.approx(
                [sum(rates) for rates in zip(*(each.rates_at(now) for each in shares), strict=True)]
            )


def test_a_target_that_no_worker_keeps_changes_nothing() -> None:
    loads = report("a", num_waiting_tokens=5000), report("b", num_waiting_tokens=9000)
    names = ["a", "b"]
    for target_s in (None, 1e-6, 1e6):
        decision = router(*loads).choose(names, [], 10, target_s)
        assert decision.instance_id == "a" and decision.routed is not None
        assert decision.routed.fit == [1.0, 1.0]


@pytest.mark.parametrize("seed", range(2))
def test_many_changes_since_the_last_choice_count_as_each_by_itself(seed: int) -> None:
    """Rows of the table are computed together; of two routers one computes each at once."""
    rng, names = random.Random(seed), [f"w{each}" for each in range(20)]
    together, one_by_one = router(), router()
    running: list[str] = []
    for number in range(300):
        for _ in range(rng.randrange(8)):
            costs = scaled(rng.uniform(0.5, 2.0)) if rng.random() < 0.9 else None
            each = report(rng.choice(names), costs, rng.randrange(30), rng.randrange(9000))
            together.update_load(each, BLOCK_SIZE)
            one_by_one.update_load(each, BLOCK_SIZE)
            one_by_one._loads.arrange(names)
        if running and rng.random() < 0.6:
            ended, is_over = running.pop(rng.randrange(len(running))), rng.random() < 0.5
            for chosen in (together, one_by_one):
                (chosen.finished if is_over else chosen.prefilled)(ended)
                if chosen is one_by_one:
                    chosen._loads.arrange(names)
        num_blocks = rng.randrange(1, 300)
        expected = one_by_one.choose(names, [], num_blocks)
        found = together.choose(names, [], num_blocks)
        assert found.routed == expected.routed
        assert (found.instance_id, found.reason) == (expected.instance_id, expected.reason)
        running.append(str(number))
        for chosen in (together, one_by_one):
            chosen.started(running[-1], found, num_blocks)
