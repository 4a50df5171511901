"""Simulated workers that take the time of an emulated device."""

import itertools
from dataclasses import replace

import pytest
from msgspec import structs

from tandem.decode.config import DisaggConfig, Policy
from tandem.emulation.profile import Profile, load_profile
from tandem.engine.schedule.step_cost import StepWork
from tandem.launch.simulation.cluster import Setup, VirtualCluster
from tandem.launch.simulation.emulated import (
    figures_of_profile,
    handoff_time_of,
    setup_of_profile,
)
from tandem.launch.simulation.load import PlannedRequest
from tandem.launch.simulation.worker import HandoffTime, VirtualWorker
from tandem.prefill.config import PrefillConfig
from tandem.router.predict import PlaceLoad
from tests.launch.simulation.setups import layout

DEVICE = load_profile("h100/llama-3.1-8b")


def setup_of(device: Profile) -> Setup:
    return setup_of_profile(device, DisaggConfig())


def requests(
    num: int, num_prompt: int, num_answer: int, *, gap_s: float = 0.0
) -> list[tuple[PlannedRequest, float]]:
    return [(PlannedRequest(i, num_prompt, num_answer, [], 0.0), gap_s * i) for i in range(num)]


def test_a_request_alone_takes_the_steps_of_the_device() -> None:
    cluster = VirtualCluster(layout("unsplit", 1), setup_of(DEVICE))
    (record,) = cluster.replay(requests(1, 1000, 3)).records
    prompt, token = StepWork(), StepWork(num_decodes=1, decode_context=1001)
    prompt.add_prompt(0, 1000)
    assert record.ttft_s == pytest.approx(DEVICE.step_seconds(prompt, 1, 0))
    assert record.gaps_s()[0] == pytest.approx(DEVICE.step_seconds(token, 1, 1))


def test_a_worker_learns_the_costs_of_a_device_that_its_figures_have_wrong() -> None:
    slower = DEVICE.model_copy(update={"token_s": 3 * DEVICE.token_s})
    setup = replace(setup_of(DEVICE), device=slower)
    cluster = VirtualCluster(layout("unsplit", 1), setup)
    cluster.replay(requests(20, 2000, 1, gap_s=1.0))
    per_step_s, per_token_s, per_position_s = cluster.workers[0].scheduler.step_cost.prompt_s
    prompt = StepWork()
    prompt.add_prompt(0, 2000)
    learned_s = per_step_s + 2000 * per_token_s + prompt.prompt_context * per_position_s
    assert learned_s == pytest.approx(slower.step_seconds(prompt, 1, 0), rel=0.05)


def test_an_additive_device_reads_its_weights_before_the_products() -> None:
    additive = DEVICE.model_copy(update={"is_additive": True})
    mixed = StepWork(num_decodes=10, decode_context=1000)
    mixed.add_prompt(0, 500)
    more_s = additive.step_seconds(mixed, 10, 10) - DEVICE.step_seconds(mixed, 10, 10)
    assert more_s == pytest.approx(DEVICE.weights_s)
    assert figures_of_profile(additive).costs.hidden_share == 0.0


def test_workers_in_turn_get_the_same_number_of_requests() -> None:
    in_turn = replace(layout("unsplit", 3), in_turn=True)
    cluster = VirtualCluster(in_turn, setup_of(DEVICE))
    outcome = cluster.replay(requests(9, 3000, 20, gap_s=0.1))
    assert len(outcome.records) == 9
    assert max(outcome.busy_s) < 1.01 * min(outcome.busy_s)


def test_a_run_that_is_cut_off_leaves_the_rest_unfinished() -> None:
    cluster = VirtualCluster(layout("unsplit", 2), setup_of(DEVICE))
    seen = itertools.count(1)
    outcome = cluster.replay(requests(50, 500, 5), goes_on=lambda record: next(seen) < 10)
    num_finished = sum(not each.unfinished for each in outcome.records)
    assert 10 <= num_finished < len(outcome.records)


def test_kv_lands_while_later_steps_of_its_prompt_are_computed() -> None:
    time = HandoffTime(0.001, 0.002)
    steps = [(0.5, 1.0, 100), (1.0, 1.1, 200), (1.9, 2.0, 250)]
    assert time.landed_s(steps, 0) == pytest.approx(2.0 + 50 * 0.002 + 0.001)
    assert time.landed_s(steps[:2], 0) == pytest.approx(1.0 + 200 * 0.002 + 0.001)  # by the link
    assert time.landed_s(steps, 180) == pytest.approx(2.0 + 50 * 0.002 + 0.001)
    assert time.landed_s(steps[:2], 180) == pytest.approx(1.1 + 20 * 0.002 + 0.001)


def test_layers_of_a_step_are_written_while_later_ones_are_computed() -> None:
    time = HandoffTime(0.001, 0.002, num_groups=4)
    assert time.landed_s([(0.0, 1.0, 100)], 0) == pytest.approx(1.0 + 100 * 0.002 / 4 + 0.001)
    slow = HandoffTime(0.001, 0.02, num_groups=4)  # the link is the longer one
    assert slow.landed_s([(0.0, 1.0, 100)], 0) == pytest.approx(0.25 + 100 * 0.02 + 0.001)


def test_where_steps_overlap_a_prompt_waits_for_the_step_that_is_launched_already() -> None:
    def first_token_of_the_later(*, overlap: bool) -> float:
        setup = setup_of(DEVICE)
        setup = replace(setup, figures=structs.replace(setup.figures, overlap=overlap))
        (_, begun_s), *_ = arrivals = requests(2, 300, 200, gap_s=0.5)
        assert begun_s == 0.0
        _, later = VirtualCluster(layout("unsplit", 1), setup).replay(arrivals).records
        assert later.ttft_s is not None
        return later.ttft_s

    step = StepWork(num_decodes=1, decode_context=370)
    more_s = first_token_of_the_later(overlap=True) - first_token_of_the_later(overlap=False)
    assert more_s == pytest.approx(DEVICE.step_seconds(step, 1, 1), rel=0.01)


def test_a_worker_tells_of_a_long_prompt_before_the_step_ends_in_which_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = VirtualCluster(layout("unsplit", 2), setup_of(DEVICE))
    told: list[tuple[float, int]] = []
    told_by_all = cluster._handoffs.reported

    def note(worker: VirtualWorker, place: PlaceLoad | None) -> None:
        assert place is not None
        told.append((cluster._clock.now_s, place.num_waiting_tokens))
        told_by_all(worker, place)

    monkeypatch.setattr(cluster._handoffs, "reported", note)
    arrivals = requests(4, 6000, 2, gap_s=0.04)  # each takes 0.15 s
    cluster.replay(arrivals)
    assert max(n for at_s, n in told if at_s < 0.13) >= 9000


def test_a_prompt_that_just_came_is_taken_to_have_come_to_each_worker_of_both_roles() -> None:
    cluster = VirtualCluster(layout("workers", 3), setup_of(DEVICE))
    cluster._report()
    home = cluster.workers[0]
    home.came("before", 4000)
    side = cluster._handoffs.side(home, "now")
    assert [place.num_waiting_tokens for place in side.others] == [4000, 4000]
    assert [
        place.num_waiting_tokens for place in cluster._handoffs.side(home, "before").others
    ] == [
        0,
        0,
    ]


def test_a_worker_that_only_decodes_begins_with_a_cautious_guess_of_transfers() -> None:
    time = handoff_time_of(DEVICE)
    cautious, measured = (time.first_guess(role).seconds(6000) for role in ("decode", "both"))
    assert measured < 0.03 < 0.3 < cautious


def test_a_wait_for_a_busy_worker_counts_as_transfer_as_decode_workers_count_it() -> None:
    def learned_s(gap_s: float) -> float:
        setup = replace(
            setup_of(DEVICE),
            disagg=DisaggConfig(policy=Policy.ALWAYS_REMOTE),
            prefill=PrefillConfig(max_batch_jobs=1),
        )
        cluster = VirtualCluster(layout("1P 1D", 2), setup)
        cluster.replay(requests(40, 300, 2, gap_s=gap_s))
        return cluster.workers[1].transfer.seconds(300)

    assert learned_s(0.0) > learned_s(1.0) + 0.01
