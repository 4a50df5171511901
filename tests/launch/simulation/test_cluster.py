"""Loads under the virtual clock, against sums by hand."""

from pathlib import Path

import msgspec
import pytest

from tandem.decode.config import DisaggConfig, Policy
from tandem.launch.simulation.layout import Layout, layouts_of
from tandem.launch.simulation.worker import VirtualWorker
from tandem.prefill.config import PrefillConfig
from tandem.runtime.wire.cluster_messages import StepCosts
from tests.launch.simulation.setups import FIGURES, layout, load_of, setup_of, simulate, write_trace

ALWAYS_REMOTE = DisaggConfig.model_validate({"policy": Policy.ALWAYS_REMOTE})


def about(*seconds: float) -> object:
    return pytest.approx(list(seconds), abs=1e-9)


def test_one_request_takes_its_prompt_and_a_step_per_further_token() -> None:
    load = load_of(num_requests=1, input_tokens=100, output_tokens=3)
    [record] = simulate(layout("unsplit", 1), setup_of(), load)
    assert record.output_times_s == about(0.015, 0.026, 0.037)
    assert record.end_s == pytest.approx(0.037)
    assert record.prefill_place == "local"


def test_a_prompt_that_comes_within_a_step_waits_for_its_end_and_delays_the_answer() -> None:
    load = load_of(
        num_requests=2, request_rate=200.0, arrival="constant", input_tokens=100, output_tokens=2
    )
    first, second = simulate(layout("unsplit", 1), setup_of(), load)
    # from 15 ms on: 11 ms for the first's decode, and 15 ms for the second's prompt
    assert first.output_times_s == about(0.015, 0.041)
    assert second.scheduled_s == pytest.approx(0.005)
    assert second.output_times_s == about(0.041, 0.052)


def test_a_closed_loop_sends_the_next_request_when_one_has_ended() -> None:
    load = load_of(concurrency=1, num_requests=3, input_tokens=100, output_tokens=1)
    records = simulate(layout("unsplit", 1), setup_of(), load)
    assert [record.scheduled_s for record in records] == about(0.0, 0.015, 0.030)


def test_a_closed_loop_ends_with_its_duration() -> None:
    load = load_of(concurrency=2, duration=0.1, input_tokens=100, output_tokens=1)
    records = simulate(layout("unsplit", 1), setup_of(), load)
    assert len(records) > 4
    assert all(record.scheduled_s < 0.1 for record in records)
    assert max(record.end_s for record in records) >= 0.1


def test_a_second_remote_prompt_waits_for_the_prefill_worker() -> None:
    load = load_of(concurrency=2, num_requests=2, input_tokens=100, output_tokens=2)
    first, second = simulate(layout("1P 1D", 2), setup_of(ALWAYS_REMOTE), load)
    # 3 ms of handoff, then a step of its own at the decode worker
    assert first.output_times_s == about(0.015, 0.015 + 0.003 + 0.011)
    assert second.output_times_s == about(0.030, 0.030 + 0.003 + 0.011)
    assert first.prefill_place == second.prefill_place == "remote"


def test_a_ticket_that_is_not_claimed_in_time_is_computed_at_home() -> None:
    config = ALWAYS_REMOTE.model_copy(update={"claim_timeout_ms": 4})
    one_job = PrefillConfig.model_validate({"max_batch_jobs": 1})
    load = load_of(concurrency=2, num_requests=2, input_tokens=100, output_tokens=2)
    first, second = simulate(layout("1P 1D", 2), setup_of(config, prefill=one_job), load)
    assert (first.prefill_place, second.prefill_place) == ("remote", "local")
    assert second.output_times_s[0] == pytest.approx(0.004 + 0.015)


def test_a_ticket_outlasts_its_time_while_the_busy_prefill_worker_is_predicted_to_be_better() -> (
    None
):
    config = DisaggConfig.model_validate({"max_local_prefill_length": 0, "claim_timeout_ms": 100})
    one_job = PrefillConfig.model_validate({"max_batch_jobs": 1})
    load = load_of(concurrency=2, num_requests=24, input_tokens=4000, output_tokens=60)
    records = simulate(layout("1P 1D", 2), setup_of(config, prefill=one_job), load)
    waits_s = [
        record.output_times_s[0] - record.scheduled_s - 0.41  # in which the prompt is computed
        for record in records
        if record.prefill_place == "remote"
    ]
    assert max(waits_s) > 0.15


def test_prompts_that_waited_for_a_batch_row_go_away_as_others_do() -> None:
    figures = msgspec.structs.replace(FIGURES, max_num_seqs=4)
    load = load_of(concurrency=12, num_requests=36, input_tokens=400, output_tokens=40)
    records = simulate(layout("1P 1D", 2), setup_of(ALWAYS_REMOTE, figures=figures), load)
    assert {record.prefill_place for record in records} == {"remote"}


def test_a_claimed_prompt_that_takes_too_long_is_computed_at_home_and_its_late_kv_dropped() -> None:
    config = ALWAYS_REMOTE.model_copy(
        update={"handoff_timeout_ms": 10, "handoff_timeout_ms_per_token": 0.0}
    )
    load = load_of(num_requests=1, input_tokens=100, output_tokens=2)
    [record] = simulate(layout("1P 1D", 2), setup_of(config), load)
    assert record.prefill_place == "local"
    assert record.output_times_s == about(0.025, 0.036)


def test_an_answer_of_one_token_ends_when_its_handoff_does() -> None:
    load = load_of(num_requests=1, input_tokens=100, output_tokens=1)
    [record] = simulate(layout("1P 1D", 2), setup_of(ALWAYS_REMOTE), load)
    assert record.output_times_s == about(0.015)
    assert record.end_s == pytest.approx(0.018)


def test_a_worker_of_both_roles_computes_another_worker_s_prompt_by_prediction() -> None:
    load = load_of(
        request_rate=9.0, num_requests=60, input_tokens=1500, input_stddev=750.0, output_tokens=50
    )
    records = simulate(layout("workers", 3), setup_of(), load)
    places = {record.prefill_place for record in records}
    assert places == {"local", "remote"}


def test_a_ticket_has_its_turn_at_a_worker_whose_own_prompts_never_end(tmp_path: Path) -> None:
    short = [(4.0 * number, 80, 2, []) for number in range(500)]
    long = [(301.0, 1500, 2, []), (601.0, 1500, 2, [])]
    trace = write_trace(tmp_path / "trace", *sorted(short + long))
    by_length = {"policy": Policy.THRESHOLD, "max_local_prefill_length": 100}
    roomy = msgspec.structs.replace(FIGURES, num_blocks=8192)
    setup = setup_of(DisaggConfig.model_validate(by_length), figures=roomy)
    records = simulate(layout("workers", 2), setup, load_of(trace=trace))
    asked = [each for each in records if each.scheduled_s in (0.301, 0.601)]
    assert [each.prefill_place for each in asked] == ["remote"] * 2


def test_answers_with_a_target_stand_on_few_workers_and_prompts_are_computed_on_the_others() -> (
    None
):
    target = DisaggConfig.model_validate({"itl_target_ms": 40})
    load = load_of(request_rate=8.0, num_requests=150, input_tokens=1500, output_tokens=100)
    setup = setup_of(target, figures=msgspec.structs.replace(FIGURES, num_blocks=8192))
    together, apart = (
        [record.output_times_s[0] - record.scheduled_s for record in records]
        for records in (simulate(layout(name, 4), setup, load) for name in ("workers", "unsplit"))
    )
    assert sum(together) < 0.8 * sum(apart)


def test_a_prompt_whose_target_is_lost_gives_way_to_those_that_can_keep_theirs(
    tmp_path: Path,
) -> None:
    target = DisaggConfig.model_validate({"ttft_target_ms": 300, "itl_target_ms": 40})
    answers = [(0.0, 16, 200, []) for _ in range(20)]  # beside which prompts are slow
    prompts = [(600.0, 4000, 2, []), (610.0, 1000, 2, []), (850.0, 500, 2, [])]
    trace = write_trace(tmp_path / "trace", *answers, *prompts)
    setup = setup_of(target, prefill=PrefillConfig.model_validate({"max_batch_jobs": 1}))
    records = simulate(layout("1P 1D", 2), setup, load_of(trace=trace))[-3:]
    assert [record.prefill_place for record in records] == ["remote"] * 3
    first_tokens_s = [record.output_times_s[0] for record in records]
    assert first_tokens_s[0] < first_tokens_s[2] < first_tokens_s[1]
    assert first_tokens_s[2] - records[2].scheduled_s < 0.3


@pytest.mark.parametrize("chosen", layouts_of(3), ids=lambda each: each.name)
def test_the_same_seed_gives_the_same_run_and_another_seed_another(chosen: Layout) -> None:
    shape = {"request_rate": 12.0, "num_requests": 40, "input_stddev": 300.0, "output_tokens": 20}
    first, again, other = (
        simulate(chosen, setup_of(seed=seed), load_of(seed, input_tokens=1000, **shape))
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("chosen", layouts_of(3), ids=lambda each: each.name)
def test_steps_that_are_gone_through_at_once_give_the_times_of_single_ones(
    chosen: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    # odd ones: no step ends at the very time of a load report
    costs = StepCosts((0.01037, 0.00101, 3.1e-7), (0.00517, 0.000103, 1.3e-8), 1.0, 2000, 1000)
    setup = setup_of(figures=msgspec.structs.replace(FIGURES, costs=costs))
    load = load_of(
        request_rate=9.0, num_requests=60, input_tokens=900, input_stddev=400.0, output_tokens=50
    )
    at_once = simulate(chosen, setup, load)
    monkeypatch.setattr(VirtualWorker, "_num_equal_steps", lambda self, chunks: 1)
    singly = simulate(chosen, setup, load)
    assert [record.prefill_place for record in at_once] == [r.prefill_place for r in singly]
    for left, right in zip(at_once, singly, strict=True):
        assert left.output_times_s == pytest.approx(right.output_times_s, abs=1e-9)


def test_a_full_pool_preempts_and_every_answer_still_ends() -> None:
    load = load_of(concurrency=40, num_requests=80, input_tokens=200, output_tokens=200)
    records = simulate(layout("unsplit", 1), setup_of(), load)
    assert all(len(record.output_times_s) == 200 for record in records)
    assert all(list(r.output_times_s) == sorted(r.output_times_s) for r in records)


def test_prompts_of_a_trace_share_the_blocks_of_equal_hash_ids(tmp_path: Path) -> None:
    trace = write_trace(
        tmp_path / "trace.jsonl",
        (0.0, 1100, 4, [1, 2, 3]),
        (1000.0, 1100, 4, [1, 2, 4]),
        (3000.0, 600, 4, [7, 2]),
    )
    load = load_of(trace=trace, time_scale=2.0)
    records = simulate(layout("unsplit", 1), setup_of(), load)
    assert [record.scheduled_s for record in records] == about(0.0, 0.5, 1.5)
    assert [record.num_cached_tokens for record in records] == [0, 1024, 0]
    assert records[1].output_times_s[0] == pytest.approx(0.5 + 0.005 + 76 * 0.0001)


def test_requests_with_a_common_prefix_go_to_the_worker_that_has_it(tmp_path: Path) -> None:
    trace = write_trace(
        tmp_path / "trace.jsonl", *((i * 1000.0, 600, 4, [i % 2, 10 + i]) for i in range(20))
    )
    records = simulate(layout("unsplit", 2), setup_of(), load_of(trace=trace))
    assert [record.num_cached_tokens for record in records[2:]] == [512] * 18
