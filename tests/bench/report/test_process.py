import sys
import time

import psutil
import pytest

from tandem.bench.report.process import GPU_FIELDS, gpu_state, run_bounded, under_load


def test_what_a_process_wrote_before_its_time_was_up_is_kept() -> None:
    started_at = time.perf_counter()
    ended = run_bounded(["sh", "-c", "echo found; sleep 60"], 1.0)
    assert (ended.code, ended.output) == (None, b"found\n")
    assert time.perf_counter() - started_at < 20


def test_a_process_is_ended_with_all_that_it_started() -> None:
    ended = run_bounded(["sh", "-c", "trap '' TERM; sleep 60 & echo $!; wait"], 1.0)
    assert _is_gone(int(ended.output))


def test_the_environment_of_a_process_is_this_ones_and_what_is_added() -> None:
    program = "import os; print(os.environ['ADDED'], 'PATH' in os.environ)"
    ended = run_bounded([sys.executable, "-c", program], 30.0, {"ADDED": "yes"})
    assert (ended.code, ended.output) == (0, b"yes True\n")


def test_readings_of_an_idle_gpu_do_not_count() -> None:
    def line(utilization: str, clocks: int, power: float) -> str:
        known = {"utilization.gpu": utilization, "clocks.sm": clocks, "power.draw": power}
        values = dict.fromkeys(GPU_FIELDS, 60) | known
        return ", ".join(str(values[name]) for name in GPU_FIELDS)

    log = [line("0", 345, 80), line("100", 1400, 700.5), line("99", 1500, 690), line("[N/A]", 1, 1)]
    load = under_load("\n".join([*log, "100, 19"]))
    assert load is not None
    found = (load.sm_mhz, load.min_sm_mhz, load.max_power_w, load.num_readings)
    assert found == (1450, 1400, 700.5, 2)
    assert under_load(log[0]) is None


def test_a_machine_without_the_tool_has_no_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert gpu_state("none") == {}


def _is_gone(pid: int) -> bool:
    """Return True for a process that has ended, reaped or not."""
    deadline = time.perf_counter() + 10
    while time.perf_counter() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False
