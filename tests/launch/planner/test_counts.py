"""The planner's choice of the number of workers, from load reports alone."""

from tandem.launch.planner.counts import RETRY_S, SPARE_S
from tandem.launch.planner.planner import Change
from tandem.runtime.wire.cluster_messages import WorkerRole
from tests.launch.planner.test_planner import Fleet, fleet, report


def workers(count: int, *, prompt_tokens: int, num_decodes: int = 0, **config: object) -> Fleet:
    """Return a fleet of workers of both roles, up to six of them where `config` says no other."""
    reports = [
        report(f"w{each}", "both", prompt_tokens=prompt_tokens, num_decodes=num_decodes)
        for each in range(count)
    ]
    return Fleet(*reports, **{"max_workers": 6, **config})


def of(change: Change | None) -> tuple[str, WorkerRole, int]:
    assert change is not None
    return change.kind, change.role, change.count


def test_workers_start_at_the_second_reading_at_which_all_are_full() -> None:
    busy = workers(2, prompt_tokens=20_000)
    first = busy.read()
    assert first.change is None and "if the next reading agrees" in first.sentence
    second = busy.read(3.0)
    assert of(second.change) == ("start", "both", 2)
    assert (
        "2 workers of both roles are" in second.sentence
        and "start of 2, role both" in second.sentence
    )


def test_only_as_many_start_as_are_needed_and_as_the_bound_allows() -> None:
    slightly = workers(2, prompt_tokens=200)
    slightly.read()
    assert of(slightly.read(3.0).change) == ("start", "both", 1)
    bound = workers(4, prompt_tokens=50_000, max_workers=5)
    bound.read()
    assert of(bound.read(3.0).change) == ("start", "both", 1)
    at_most = workers(2, prompt_tokens=50_000, max_workers=2)
    at_most.read()
    reading = at_most.read(3.0)
    assert reading.change is None and "planner.max_workers is 2" in reading.sentence


def test_nothing_else_changes_while_one_change_is_under_way() -> None:
    busy = workers(2, prompt_tokens=20_000)
    busy.read()
    change = busy.read(3.0).change
    for _ in range(3):
        reading = busy.read(3.0, under_way=change)
        assert reading.change is None
        assert reading.sentence.endswith("under way: start of 2, role both")


def test_workers_that_do_not_report_yet_count() -> None:
    busy = workers(2, prompt_tokens=3_000)
    busy.planner.keep(["w0", "w1", "new-1", "new-2"])
    busy.read()
    assert busy.read(3.0).change is None
    busy.planner.keep(["w0", "w1"])
    busy.read(3.0)
    assert of(busy.read(3.0).change)[0] == "start"


def test_a_worker_ends_when_fewer_were_enough_for_long_and_then_the_next_one() -> None:
    idle = workers(3, prompt_tokens=0, num_decodes=2)
    for _ in range(int(SPARE_S / 3)):
        reading = idle.read(3.0)
        assert reading.change is None and "if that lasts 60 s" in reading.sentence
    assert of(idle.read(3.0).change) == ("stop", "both", 1)
    idle.reports.pop()
    idle.planner.keep(["w0", "w1"])
    assert of(idle.read(3.0).change) == ("stop", "both", 1)
    idle.reports.pop()
    idle.planner.keep(["w0"])
    assert idle.read(3.0).change is None


def test_one_busy_reading_within_the_time_keeps_the_workers() -> None:
    idle = workers(2, prompt_tokens=0)
    quiet = list(idle.reports)
    idle.read(SPARE_S - 10)
    idle.reports[:] = workers(2, prompt_tokens=20_000).reports
    assert idle.read(10.0).change is None
    idle.reports[:] = quiet
    assert idle.read(20.0).change is None  # prompts that waited are forgotten
    assert idle.read(SPARE_S - 10).change is None
    idle.read(20.0)
    assert of(idle.read(3.0).change)[0] == "stop"


def test_the_bounds_hold_whatever_the_load() -> None:
    assert of(workers(2, prompt_tokens=0, min_workers=3).read().change) == ("start", "both", 1)
    assert of(workers(4, prompt_tokens=20_000, max_workers=3).read().change)[0] == "stop"


def test_a_change_that_failed_is_tried_again_later() -> None:
    busy = workers(2, prompt_tokens=20_000)
    busy.read()
    busy.planner.counts.ended(busy.now_s, "no GPU is left")
    reading = busy.read(3.0)
    assert reading.change is None and "the last change failed: no GPU is left" in reading.sentence
    busy.read(RETRY_S)
    assert of(busy.read(3.0).change)[0] == "start"


def test_with_fixed_roles_the_side_that_is_full_grows() -> None:
    def bounded(num_prefill: int, num_decode: int, prompt_tokens: int, num_decodes: int) -> Fleet:
        found = fleet(num_prefill, num_decode, prompt_tokens=prompt_tokens, num_decodes=num_decodes)
        return Fleet(*found.reports, max_workers=8)

    prompts = bounded(2, 1, 60_000, 5)  # no role is left to move
    prompts.read()
    assert of(prompts.read(3.0).change)[:2] == ("start", "prefill")
    answers = bounded(1, 2, 0, 256)
    answers.read()
    assert of(answers.read(3.0).change)[:2] == ("start", "decode")
    idle = bounded(2, 2, 0, 1)
    idle.read(SPARE_S + 1)
    idle.read(3.0)
    assert of(idle.read(SPARE_S).change)[0] == "stop"
