"""Predicted times of a prompt, against a scheduler's steps counted by hand."""

import numpy as np
import pytest
from msgspec.structs import astuple, replace

from tandem.router.predict import (
    ANSWER_WEIGHT,
    Pace,
    PlaceLoad,
    num_holding,
    predict,
    scaled,
    share_left,
    shared_step_s,
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


def test_a_step_holds_whole_tiles() -> None:
    tiled = replace(COSTS, tile_tokens=32)
    # 70 tokens fit, 59 of which fill two tiles with the 5 decodes
    found = predict(PlaceLoad(tiled, num_decodes=5), 118)
    assert found.first_token_s == pytest.approx(0.118 + 2 * 0.02)
    # 200 answers, in whose last tile is room for 24 tokens
    slow = predict(PlaceLoad(tiled, num_decodes=200), 48)
    assert slow.compute_s == pytest.approx(0.048 + 2 * (0.005 + 0.21))


def test_prompts_that_came_first_are_computed_first() -> None:
    found = predict(PlaceLoad(COSTS, num_waiting_tokens=400), 100)
    assert found.wait_s == pytest.approx(0.405)
    assert found.compute_s == pytest.approx(0.105)


def test_a_long_step_of_decodes_leaves_room_for_a_few_tokens() -> None:
    slow = PlaceLoad(COSTS, num_decodes=200)
    assert predict(slow, 32).compute_s == pytest.approx(0.032 + 2 * (0.005 + 0.21))
    assert predict(slow, 32).step_s == pytest.approx(0.21)


def test_positions_cost_what_they_cost() -> None:
    costs = StepCosts((0.0, 0.0, 0.0), (0.0, 0.0, 1e-6), 0.1, 400, 200)
    assert predict(PlaceLoad(costs), 100, 1000).compute_s == pytest.approx(100 * 1050 * 1e-6)


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


def test_answers_with_a_target_stand_together_where_that_leaves_prompts_any_more_time() -> None:
    costs = StepCosts(
        *((6.4e-3, 5e-6, 4.9e-8), (8e-4, 3.1e-5, 1.5e-9), 0.02, 8192, 512, True),
        hidden_share=1.0,
    )
    answers = 16, 16 * 6000.0  # and their context; steps of 8 ms with four, of 11 with all of them
    # spread over four workers they leave prompts 3.1 seconds a second, on one of them 3.6
    assert num_holding(costs, 4e5, 128, 2.0, 2.2, 4, *answers) == 1
    assert num_holding(costs, 4e5, 128, 2.0, 2.4, 4, *answers) == 4, (
        "elsewhere they are computed whole"
    )
    assert num_holding(costs, 4e5, 128, 0.5, 0.5, 4, *answers) == 4, "prompts need too little of it"


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
