"""Predicted times of a prompt, against a scheduler's steps counted by hand."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from tandem.router.predict import (
    ANSWER_WEIGHT,
    FLOOR_TOKENS,
    PLANNED_SHARE,
    Pace,
    PlaceLoad,
    bounding_arrays,
    predict,
    scaled,
    share_left,
)
from tandem.runtime.wire.cluster_messages import LoadReport, StepCosts

# 10 ms a step with decodes, 1 ms a decode; 5 ms a step with prompts, 1 ms a prompt token
COSTS = StepCosts((0.01, 0.001, 0.0), (0.005, 0.001, 0.0), 0.1, 400, 200)


def test_an_idle_worker_computes_in_steps_of_its_largest_size() -> None:
    found = predict(PlaceLoad(COSTS), 1000)
    assert found.wait_s == 0.0 and found.num_delayed == 0 and found.step_s == 0.0
    assert found.first_token_s == pytest.approx(1.0 + 3 * 0.005)  # 400 + 400 + 200
    assert found.cost_s == found.first_token_s


def test_beside_decodes_a_step_holds_what_its_time_allows() -> None:
    load = PlaceLoad(COSTS, num_decodes=5)
    # 90 ms planned, 15 of them for the decodes, 5 for the step: 70 tokens
    found = predict(load, 140)
    assert found.first_token_s == pytest.approx(0.14 + 2 * 0.02)
    assert found.cost_s == pytest.approx(found.first_token_s + ANSWER_WEIGHT * 5 * found.compute_s)
    assert found.step_s == pytest.approx(0.1)


def shared_step_s(load: PlaceLoad, num_uncached: int, num_following: int) -> float:
    return predict(replace(load, num_following_tokens=num_following), num_uncached).shared_s


def test_prompts_that_follow_lengthen_the_last_step_as_far_as_it_has_room() -> None:
    idle, beside = PlaceLoad(COSTS), PlaceLoad(COSTS, num_decodes=5)  # 400 and 70 tokens a step
    assert shared_step_s(idle, 100, 50) == pytest.approx(0.05)
    assert shared_step_s(idle, 100, 5000) == pytest.approx(0.3)
    assert shared_step_s(idle, 800, 50) == 0.0
    assert shared_step_s(beside, 100, 5000) == pytest.approx(0.04)
    assert shared_step_s(beside.behind(30), 100, 5000) == pytest.approx(0.01)
    assert shared_step_s(idle, 100, 0) == 0.0


def test_a_report_without_costs_gives_no_place() -> None:
    report = LoadReport("a", "b", "both", 1, 2, 30, 100, 40, 50, 1, 500)
    assert PlaceLoad.of(report) is None
    known = LoadReport("a", "b", "both", 1, 2, 30, 100, 40, 50, 1, 500, COSTS)
    assert PlaceLoad.of(known) == PlaceLoad(COSTS, 1, 500, 30, "a")


def test_a_wait_counts_the_attention_of_the_prompts_that_come_first() -> None:
    costs = StepCosts((0.0, 0.0, 0.0), (0.0, 2e-5, 8e-10), 0.05, 8192, 8192)
    long = predict(PlaceLoad(costs), 60_000)
    assert long.first_token_s == pytest.approx(60_000 * (2e-5 + 8e-10 * 30_000))
    behind = PlaceLoad(costs).behind(60_000, 60_000**2 / 2)
    assert predict(behind, 1).wait_s == pytest.approx(long.first_token_s)


@pytest.mark.parametrize(
    ("seconds", "factors"),
    [
        ([0.1, 0.3, 0.4], None),
        ([0.1, 0.3, 1.0], [1.0, 1.0, 0.4]),
        ([0.0, 0.1, 0.8], [1.0, 1.0, 0.5]),  # of which one is not learned yet
    ],
)
def test_none_counts_as_slower_than_a_multiple_of_the_fastest(
    seconds: list[float], factors: list[float] | None
) -> None:
    alike = np.full(3, 0.2)
    for at in (0, 1):
        given = [alike, np.array(seconds)] if at else [np.array(seconds), alike]
        found = bounding_arrays(*given)
        assert (found is None) == (factors is None)
        if found is not None:
            assert found[at].tolist() == pytest.approx(factors)
            assert found[1 - at].tolist() == [1.0] * 3


# Launches take 50 ms of every step with prompts, and 200 ms where they are slow.
LAUNCHED, SLOWLY_LAUNCHED = (replace(COSTS, prompt_floor_s=floor_s) for floor_s in (0.05, 0.2))


def test_no_step_with_prompts_is_shorter_than_its_launches() -> None:
    assert predict(PlaceLoad(LAUNCHED), 10).first_token_s == pytest.approx(0.05)
    assert predict(PlaceLoad(LAUNCHED), 100).first_token_s == pytest.approx(0.105)
    behind = predict(PlaceLoad(LAUNCHED, num_waiting_tokens=10), 10)
    assert behind.wait_s == pytest.approx(0.05) and behind.compute_s == pytest.approx(0.05)
    assert shared_step_s(PlaceLoad(LAUNCHED), 10, 50) == pytest.approx(0.015)  # 60 tokens, 65 ms
    assert shared_step_s(PlaceLoad(LAUNCHED), 10, 20) == 0.0


def test_steps_beside_decodes_are_filled_up_to_their_launches() -> None:
    beside = PlaceLoad(SLOWLY_LAUNCHED, num_decodes=5)
    # 200 ms, 15 of them for the decodes, 5 for the step: 180 tokens
    found = predict(beside, 360)
    assert found.first_token_s == pytest.approx(0.4)
    assert found.step_s == pytest.approx(0.2), "the answers wait for the launches"
    assert share_left(SLOWLY_LAUNCHED, 0.015) == pytest.approx(0.18 / 0.2)
    assert share_left(LAUNCHED, 0.015) == share_left(COSTS, 0.015)


def test_launches_count_for_many_workers_at_once() -> None:
    loads = [
        PlaceLoad(costs, num_decodes, 0, num_waiting)
        for costs in (COSTS, LAUNCHED, SLOWLY_LAUNCHED)
        for num_decodes, num_waiting in ((0, 0), (5, 20), (60, 500))
    ]
    paces = [Pace.of(load) for load in loads]
    together = Pace(*np.array([astuple(pace) for pace in paces]).T)
    half = scaled(together, np.full(len(loads), 0.5), np.ones(len(loads)))
    for tokens in (1.0, 30.0, 5000.0):
        alone = [pace.compute_s(tokens, 0.0) for pace in paces]
        assert together.compute_s(tokens, 0.0).tolist() == pytest.approx(alone)
        assert (half.compute_s(tokens, 0.0) <= together.compute_s(tokens, 0.0)).all()
    assert half.wait_s[1] < together.wait_s[1] and half.wait_s[7] < together.wait_s[7]
    assert half.compute_s(1.0, 0.0)[6] == pytest.approx(0.1), "the launches of a slow moment"


# ---- against plain counting ---------------------------------------------------------------------

LEARNED = st.builds(
    StepCosts,
    decode_s=st.tuples(st.floats(1e-3, 0.02), st.floats(0, 1e-3), st.floats(0, 1e-6)),
    prompt_s=st.tuples(st.floats(0, 0.02), st.floats(1e-4, 1e-3), st.floats(0, 1e-6)),
    max_step_s=st.floats(0.01, 0.2),
    max_tokens=st.integers(100, 600),
    max_tokens_beside=st.integers(30, 600),
    has_target=st.booleans(),
    hidden_share=st.floats(0, 1),
    prompt_floor_s=st.just(0.0) | st.floats(0.0, 0.1),
    tile_tokens=st.sampled_from([1, 1, 32, 64]),
)


def step_tokens(load: PlaceLoad) -> int:
    """Return the largest number of prompt tokens whose step is in time, or the smallest allowed."""
    costs, num_decodes = load.costs, load.num_decodes
    if not num_decodes:
        return costs.max_tokens
    planned_s = max(PLANNED_SHARE * costs.max_step_s, costs.prompt_floor_s)
    beside = num_decodes if costs.tile_tokens > 1 else 0  # whose products share the tiles
    sizes = [n for n in range(1, 700) if (n + num_decodes) % costs.tile_tokens == 0]

    def seconds(num_tokens: int) -> float:
        return constant_s(load) + num_tokens * costs.prompt_s[1]

    most = min(costs.max_tokens, costs.max_tokens_beside)
    assume(all(abs(seconds(n + beside) - planned_s) > 1e-9 for n in sizes))
    fitting = [n for n in sizes if n + beside <= most and seconds(n + beside) <= planned_s]
    return max([*fitting, min(n for n in sizes if n >= FLOOR_TOKENS)])


def constant_s(load: PlaceLoad) -> float:
    """Return the seconds of a step without those of its prompt tokens."""
    costs = load.costs
    if not load.num_decodes:
        return costs.prompt_s[0]
    per_step_s, per_decode_s, per_context_s = costs.decode_s
    decode_s = per_step_s + load.num_decodes * per_decode_s + load.decode_context * per_context_s
    return costs.prompt_s[0] + decode_s - costs.hidden_share * per_step_s


@settings(max_examples=200, deadline=None)
@given(
    LEARNED,
    st.just(0) | st.integers(1, 200),
    st.integers(0, 100_000),
    st.integers(0, 2000),
    st.integers(1, 2000),
    st.integers(0, 2000),
)
def test_a_prompt_takes_the_time_of_the_steps_that_hold_it(
    costs: StepCosts,
    num_decodes: int,
    context: int,
    num_waiting: int,
    num_uncached: int,
    num_cached: int,
) -> None:
    load = PlaceLoad(costs, num_decodes, context, num_waiting)

    def seconds(num_tokens: int) -> tuple[float, float]:
        num_steps = -(-num_tokens // step_tokens(load))
        by_sum = num_tokens * costs.prompt_s[1] + num_steps * constant_s(load)
        return by_sum, num_steps * costs.prompt_floor_s

    positions_s = costs.prompt_s[2] * num_uncached * (num_cached + num_uncached / 2)
    by_sum, by_launches = seconds(num_uncached)
    compute_s = max(by_sum + positions_s, by_launches)
    found = predict(load, num_uncached, num_cached, 3.0)
    assert found.wait_s == pytest.approx(max(seconds(num_waiting)))
    assert found.compute_s == pytest.approx(compute_s)
    assert found.first_token_s == pytest.approx(found.wait_s + compute_s + 3.0)
    decode_s = Pace.of(load).decode_s
    in_time = costs.has_target and max(decode_s, costs.prompt_floor_s) <= costs.max_step_s
    weight = 0.0 if in_time else ANSWER_WEIGHT * num_decodes
    assert found.cost_s == pytest.approx(found.first_token_s + weight * compute_s)
    longest_s = max(decode_s, costs.max_step_s, costs.prompt_floor_s)
    assert found.step_s == (min(found.compute_s, longest_s) if num_decodes else 0.0)
