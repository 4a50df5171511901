"""The planner's choice, from load reports alone."""

import msgspec
import pytest

from tandem.config.planner import PlannerConfig
from tandem.launch.planner.planner import MAX_SILENCE_S, Change, Planner, Reading
from tandem.runtime.wire.cluster_messages import LoadReport, StepCosts, WorkerRole

# A step of answers takes 5 ms and 50 us for each; a prompt token 0.1 ms; steps end within 20 ms.
COSTS = StepCosts(
    (0.005, 0.00005, 0.0), (0.001, 0.0001, 0.0), 0.02, 2000, 500, has_target=True, ttft_target_s=1.0
)
BLOCK_SIZE = 16
NUM_BLOCKS = 4096


def report(
    name: str, role: WorkerRole, *, num_decodes: int = 0, prompt_tokens: int = 0, used: int = 0
) -> LoadReport:
    return LoadReport(
        instance_id=name,
        epoch="e",
        role=role,
        num_running=num_decodes,
        num_waiting=0,
        num_waiting_tokens=prompt_tokens + num_decodes,
        num_blocks=NUM_BLOCKS,
        num_free_blocks=NUM_BLOCKS - used,
        num_cached_blocks=0,
        num_decodes=num_decodes,
        decode_context=100 * num_decodes,
        costs=COSTS,
        max_num_seqs=256,
    )


class Fleet:
    """Workers whose reports stay the same, and the planner that follows them."""

    def __init__(self, *reports: LoadReport, **config: object) -> None:
        self.reports = list(reports)
        self.planner = Planner(PlannerConfig.model_validate(config), BLOCK_SIZE)
        self.now_s = 0.0

    def read(
        self, seconds: float = 20.0, tickets: int = 0, under_way: Change | None = None
    ) -> Reading:
        """Report four times a second for so long, and decide."""
        for _ in range(int(seconds * 4)):
            self.now_s += 0.25
            for each in self.reports:
                self.planner.reported(each, self.now_s)
        return self.planner.decide(tickets, self.now_s, under_way)


def fleet(num_prefill: int, num_decode: int, *, prompt_tokens: int, num_decodes: int) -> Fleet:
    prefill = [report(f"p{i}", "prefill", prompt_tokens=prompt_tokens) for i in range(num_prefill)]
    decode = [report(f"d{i}", "decode", num_decodes=num_decodes) for i in range(num_decode)]
    return Fleet(*prefill, *decode)


def test_a_decode_worker_becomes_prefill_where_prompts_wait() -> None:
    reading = fleet(1, 3, prompt_tokens=40_000, num_decodes=5).read()
    assert reading.change is not None and reading.change.role == "prefill"
    assert reading.change.instance_id == "d0"
    assert "1 prefill workers are" in reading.sentence and "d0 to prefill" in reading.sentence


def test_a_prefill_worker_becomes_decode_where_answers_fill_the_steps() -> None:
    reading = fleet(3, 1, prompt_tokens=0, num_decodes=240).read()
    assert reading.change is not None and reading.change.role == "decode"
    assert reading.change.instance_id == "p0"


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 3), (2, 2), (3, 1)])
def test_no_role_moves_while_both_sides_have_room(num_prefill: int, num_decode: int) -> None:
    small = fleet(num_prefill, num_decode, prompt_tokens=0, num_decodes=10)
    for _ in range(10):
        assert small.read(3.0).change is None


def test_a_small_need_moves_nothing_until_the_next_reading_agrees() -> None:
    near = fleet(3, 2, prompt_tokens=10_000, num_decodes=5)
    first = near.read()
    assert first.change is None and "if the next reading agrees" in first.sentence
    assert near.read(3.0).change is not None


def test_overload_on_both_sides_moves_nothing() -> None:
    full = fleet(2, 2, prompt_tokens=12_000, num_decodes=250)
    for _ in range(5):
        reading = full.read(3.0)
        assert reading.change is None
    assert "no split of 4 workers is clearly better" in reading.sentence


def test_a_small_gain_moves_a_role_only_where_a_side_cannot_keep_up() -> None:
    near = fleet(4, 4, prompt_tokens=8_000, num_decodes=40)  # 91 % full, 82 % with 6 prefill
    beyond = fleet(5, 3, prompt_tokens=10_000, num_decodes=60)  # 111 %, 101 % with 6
    for _ in range(3):
        assert near.read().change is None
    assert beyond.read().change is None  # one reading is not enough
    change = beyond.read(3.0).change
    assert change is not None and change.role == "prefill"


def test_the_bounds_are_kept() -> None:
    most = fleet(2, 1, prompt_tokens=90_000, num_decodes=5)
    assert most.read().change is None
    least = fleet(1, 2, prompt_tokens=0, num_decodes=256)
    assert least.read().change is None


def test_workers_that_are_needed_for_their_blocks_keep_their_role() -> None:
    full = [report(f"d{i}", "decode", num_decodes=5, used=NUM_BLOCKS * 8 // 10) for i in range(3)]
    held = Fleet(report("p0", "prefill", prompt_tokens=40_000), *full)
    assert held.read().change is None


def test_tickets_in_the_queue_count_as_prompts_that_wait() -> None:
    idle = fleet(1, 3, prompt_tokens=0, num_decodes=5)
    assert idle.read().change is None
    assert idle.read(tickets=150_000).change is not None


def test_the_worker_with_the_least_work_moves() -> None:
    prefill = report("p0", "prefill", prompt_tokens=40_000)
    busy, idle = report("d0", "decode", num_decodes=30), report("d1", "decode", num_decodes=2)
    change = Fleet(prefill, busy, idle).read().change
    assert change is not None and change.instance_id == "d1"


def test_a_silent_worker_is_no_capacity() -> None:
    silent = fleet(1, 3, prompt_tokens=40_000, num_decodes=5)
    assert silent.read().change is not None
    reading = silent.planner.decide(0, silent.now_s + MAX_SILENCE_S + 0.1)
    assert reading.change is None and reading.num_prefill + reading.num_generating == 0


def test_workers_of_both_roles_need_no_planner() -> None:
    both = [report(f"w{i}", "both", prompt_tokens=50_000) for i in range(2)]
    reading = Fleet(*both).read()
    assert reading.change is None and "takes prompts as they come" in reading.sentence


def test_a_worker_goes_back_to_the_role_of_the_others() -> None:
    both = report("w0", "both", num_decodes=240)
    prefill = [report(f"p{i}", "prefill") for i in range(2)]
    change = Fleet(both, *prefill).read().change
    assert change is not None and change.role == "both"


def test_nothing_is_planned_before_costs_are_known() -> None:
    reports = [report("p0", "prefill", prompt_tokens=40_000), report("d0", "decode")]
    reading = Fleet(*(msgspec.structs.replace(each, costs=None) for each in reports)).read()
    assert reading.change is None and "no step costs are known yet" in reading.sentence
