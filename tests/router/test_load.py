"""The load of a worker by its reports and our requests, and the table of many."""

import math

import pytest
from msgspec.structs import replace

from tandem.router.load import NO_RATES, RATE_S, InstanceLoad, Rates, Shared
from tandem.router.load_table import LoadTable
from tandem.runtime.wire.cluster_messages import LoadReport, StepCosts

COSTS = StepCosts((0.01, 0.001, 0.0), (0.005, 0.0001, 1e-9), 0.1, 2048, 512)
# 5 running and 3 waiting requests in 60 blocks of 16 tokens; 40 of 100 are free or cached
REPORT = LoadReport("w", "e", "both", 5, 3, 320, 100, 30, 10, 4, 400, COSTS, 10)


def reported(
    report: LoadReport = REPORT,
    num_requests: int = 2,
    num_prefilling: int = 1,
    active_blocks: int = 12,
    pending_blocks: int = 4,
) -> InstanceLoad:
    load = InstanceLoad(
        0,
        num_requests=num_requests,
        num_prefilling=num_prefilling,
        active_blocks=active_blocks,
        pending_blocks=pending_blocks,
    )
    load.report(report, 16)
    return load


def test_a_report_adds_what_is_not_ours() -> None:
    load = reported()
    # two of eight requests are ours: three quarters of the 60 blocks in use are others'
    assert (load.foreign_blocks, load.answer_blocks) == (45.0, 3.0)
    assert (load.active(), load.pending()) == (12 + 45 + 3, 20)
    assert (load.num_answers, load.num_decodes, load.context) == (8, 4, 100.0)
    assert (load.max_context, load.num_fillable()) == (1600, 40.0)
    load.num_left = 1  # half of those that were reported: the blocks of their answers go too
    assert load.active() == 12 + 45 + 1.5


def test_a_report_that_is_older_than_our_requests_takes_none_away() -> None:
    late = reported(num_requests=9, num_prefilling=0, active_blocks=70, pending_blocks=30)
    assert (late.active(), late.pending(), late.num_decodes, late.num_answers) == (70, 30, 9, 9)
    assert (late.foreign_pending_blocks, late.foreign_decodes, late.foreign_requests) == (0, 0, 0)


def test_an_instance_without_a_report_is_as_we_load_it() -> None:
    load = InstanceLoad(0, num_requests=4, active_blocks=10)
    assert load.pace() is None and load.ttft_target_s == math.inf
    assert (load.num_fillable(), load.context) == (math.inf, 40.0)
    quiet = reported(LoadReport("w", "e", "decode", 0, 0, 0, 0, 0, 0), 0, 0, 0, 0)
    assert (quiet.active(), quiet.num_answers, quiet.context) == (0.0, 0, 0.0)
    alone = reported(replace(REPORT, num_decodes=1), num_requests=1)
    assert alone.context == 400.0
    full = reported(replace(REPORT, max_num_seqs=8))
    assert full.num_fillable() == -math.inf


def test_answers_have_the_context_that_their_steps_have_time_for() -> None:
    """Nine answers take 19 ms, 60 blocks in use 9.6, of the 90 that a step is planned with."""
    with_context = replace(COSTS, decode_s=(0.01, 0.001, 1e-5), has_target=True)
    load = reported(replace(REPORT, costs=with_context))
    assert load.num_in_time() == pytest.approx((0.09 - 0.019 - 0.0096) / (1e-5 * 16))
    assert (
        reported(replace(REPORT, costs=replace(COSTS, has_target=True))).num_in_time() == math.inf
    )
    assert reported().num_in_time() == math.inf, "no target"


def test_the_positions_of_prompts_that_wait_count_once() -> None:
    load = reported(replace(REPORT, waiting_context=5000))
    load.pending_context = 1200.0
    load.report(replace(REPORT, waiting_context=5000), 16)
    assert (load.pending_context, load.foreign_pending_context) == (1200.0, 3800.0)
    pace, without = load.pace(), reported().pace()
    assert pace is not None and without is not None
    assert pace.waiting_tokens_s - without.waiting_tokens_s == pytest.approx(5000 * 1e-9)


def test_the_rate_of_prompts_fades_and_counts_what_is_not_cached() -> None:
    load = reported(replace(REPORT, costs=replace(COSTS, longest_local=999)))
    load.rate_prompt(1000, 500, now_s=7.0)
    load.rate_prompt(999, 500, now_s=7.0)
    computed_s, whole_s = 1000 * (1e-4 + 1e-9 * 1000), 1500 * (1e-4 + 1e-9 * 750)
    local_s = 999 * (1e-4 + 1e-9 * 999.5)
    expected = (computed_s / RATE_S, whole_s / RATE_S, local_s / RATE_S, 1 / RATE_S)
    assert load.rated.rates_at(7.0) == pytest.approx(expected)
    later = [rate / math.e for rate in expected]
    assert load.rated.rates_at(7.0 + RATE_S) == pytest.approx(later)
    load.rate_prompt(1000, 500, now_s=7.0 + RATE_S)
    load.rate_prompt(999, 500, now_s=7.0 + RATE_S)
    both = [rate * (1 + 1 / math.e) for rate in expected]
    assert load.rated.rates_at(7.0 + RATE_S) == pytest.approx(both)
    assert Shared().rates_at(1e6) == NO_RATES
    local = reported(replace(REPORT, costs=replace(COSTS, longest_local=9)))
    local.rate_prompt(9, 0, now_s=1.0)
    local_s = 9 * (1e-4 + 4.5e-9)
    assert local.rated.rates_at(1.0) == (0.0, 0.0, pytest.approx(local_s / RATE_S), 0.0)


def test_a_silence_that_no_chance_explains_lowers_the_rate_of_prompts_elsewhere() -> None:
    """At four prompts a second three are due in 0.75 s; as few as none in 1.5 s, then, at two."""
    rates = Rates(0.8, 1.2, 0.4, 4.0)
    assert rates.after_silence(0.75) == rates
    assert rates.after_silence(1.5) == pytest.approx((0.4, 0.6, 0.4, 2.0))
    assert NO_RATES.after_silence(1e6) == NO_RATES


def test_the_silence_of_several_workers_is_that_since_the_last_prompt_of_any() -> None:
    report = replace(REPORT, costs=replace(COSTS, longest_local=999))
    first, second = reported(report), reported(report)
    for number in range(20):
        first.rate_prompt(1000, 0, now_s=1.0 + number / 10)
    second.rate_prompt(1000, 0, now_s=3.5)
    second.rate_prompt(1, 0, now_s=9.0)
    total = Shared()
    total.replace(Shared(), first.sharing())
    total.replace(Shared(), second.sharing())
    assert total.away_at_s == 3.5
    assert total.rates_now(3.6) == total.rates_at(3.6)
    faded = total.rates_at(9.5)
    assert total.rates_now(9.5) == faded.after_silence(6.0)
    assert total.rates_now(9.5).away < 0.6 * faded.away
    assert total.rates_now(9.5).local == faded.local


@pytest.mark.parametrize("changes", [{"role": "decode"}, {"costs": None}])
def test_only_a_worker_that_takes_tickets_has_a_rate(changes: dict[str, object]) -> None:
    load = reported(replace(REPORT, **changes))
    load.rate_prompt(1000, 0, now_s=1.0)
    assert load.rated == load.sharing() == Shared()


def test_workers_that_take_tickets_are_summed_and_taken_out_again() -> None:
    load, total = reported(), Shared()
    load.rate_prompt(1000, 0, now_s=3.0)
    part = load.sharing()
    assert (part.num_workers, part.num_answers, part.context) == (1, 4, 400.0)
    for _ in range(2):
        total.replace(Shared(), part)
    assert (total.num_workers, total.num_answers, total.context) == (2, 8, 800.0)
    assert total.rates_at(3.0) == pytest.approx([2 * rate for rate in part.rates_at(3.0)])
    total.replace(part, Shared())
    assert (total.num_workers, total.num_answers, total.context) == (1, 4, 400.0)
    assert total.rates_at(3.0) == pytest.approx(part.rates_at(3.0))


def waiting(table: LoadTable, name: str, num_blocks: int) -> None:
    table.add(name).report(replace(REPORT, num_waiting_tokens=16 * num_blocks), 16)
    table.changed(name)


def test_rows_stay_apart_where_instances_come_and_go_among_the_others() -> None:
    table, names = LoadTable(), [f"w{number}" for number in range(16)]
    for number, name in enumerate(names):
        waiting(table, name, number)
    table.arrange(names)
    waiting(table, "another", 50)  # for which the table grows
    waiting(table, "w3", 60)
    table.arrange(names)
    assert list(table.blocks()[0]) == [0, 1, 2, 60, *range(4, 16)]
    table.arrange(names[-3:])
    for number in range(14):
        waiting(table, f"more{number}", 70)
    table.arrange(names[-3:])
    assert list(table.blocks()[0]) == [13, 14, 15]
    table.changed("another")
    table.remove("another")
    table.remove("nobody")
    table.arrange(names)
    assert list(table.blocks()[0]) == [0, 1, 2, 60, *range(4, 16)]
    table.remove("w3")
    table.arrange(names)
    assert list(table.blocks()[0]) == [0, 1, 2, 0, *range(4, 16)]


def test_instances_that_come_and_go_between_choices_take_no_more_rows() -> None:
    table = LoadTable()
    for number in range(100):
        table.add(str(number))
        table.remove(str(number))
    assert table._columns.shape[1] == 16


def test_a_table_grows_and_gives_rows_again() -> None:
    table, names = LoadTable(), [f"w{number}" for number in range(40)]
    for number, name in enumerate(names):
        waiting(table, name, number)
    table.arrange(names)
    assert list(table.blocks()[0]) == list(range(40)) and table.paces() is not None
    for name in names[:30]:
        table.remove(name)
    assert table.get(names[0]) is None
    table.add("new").num_requests = 3
    table.changed("new")
    table.arrange(["new", *names[30:]])
    assert list(table.blocks()[0]) == [0, *range(30, 40)]
    assert list(table.num_requests()) == [3, *[0] * 10]
    assert list(table.fit(40)) == [True] * 11 and list(table.fit(41)) == [True] + [False] * 10
    shared = table.sharing()
    assert shared is not None and shared[2].num_workers == 10
    assert list(shared[0]) == [0, *[1] * 10] and list(shared[1]) == [3, *[8] * 10]


def test_an_instance_borrows_the_costs_of_the_median_until_it_has_its_own() -> None:
    table = LoadTable()
    for factor in (3, 1, 2):
        prompt_s = (0.005, factor * 1e-4, 0.0)
        table.add(str(factor)).set_costs(replace(COSTS, prompt_s=prompt_s, ttft_target_s=factor))
        table.changed(str(factor))
    names = ["new", "1", "2", "3"]
    table.arrange(["new"])
    assert table.paces() is None and table.ttft_targets() is None
    table.arrange(names)
    assert table.paces() is not None
    new = table.get("new")
    assert new is not None and new.costs is not None
    assert new.costs.prompt_s == (0.005, 2e-4, 0.0)
    targets = table.ttft_targets()
    assert targets is not None and list(targets) == [2.0, 1.0, 2.0, 3.0]
