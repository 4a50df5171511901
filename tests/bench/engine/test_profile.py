import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.bench.engine.profile import STEP_MARK, by_step, idle_of, profiled
from tandem.bench.report.setting import Setting, setting_for

Event = Mapping[str, Any]


def mark(ts: float, dur: float) -> Event:
    return {"cat": "user_annotation", "name": STEP_MARK, "ts": ts, "dur": dur, "args": {}}


def call(ts: float, correlation: int, name: str = "cudaGraphLaunch") -> Event:
    args = {"correlation": correlation}
    return {"cat": "cuda_runtime", "name": name, "ts": ts, "dur": 1.0, "args": args}


def ran(ts: float, dur: float, correlation: int, name: str = "gemm", cat: str = "kernel") -> Event:
    args = {"correlation": correlation}
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def overlapped() -> list[dict[str, Any]]:
    """Three steps, launched before the one before them has ended; 10 of 100 us between graphs.

    Of these 10 a copy takes 4. Within a graph 1 us lies between its two kernels.
    """
    events: list[Event] = [{"name": "process_name", "ph": "M"}]
    for index in range(3):
        begin, copy, graph = 100.0 * index, 10 + index, 20 + index
        events += [mark(begin, 50), call(begin + 10, copy, "cudaMemcpyAsync")]
        events += [call(begin + 20, graph)]
        start = 1000 + begin
        events += [ran(start - 4, 4, copy, "Memcpy HtoD", "gpu_memcpy")]
        events += [ran(start, 39, graph, "attention"), ran(start + 40, 50, graph)]
    return [dict(event) for event in events]


def test_an_activity_belongs_to_the_step_that_launched_it() -> None:
    stray = [call(70.0, 99, "cudaLaunchKernel"), ran(1095, 1, 99, "elsewhere")]
    steps = by_step([*overlapped(), *map(dict, stray)])
    assert [[each.name for each in step] for step in steps] == [
        ["Memcpy HtoD", "attention", "gemm"]
    ] * 3


def test_idle_between_graphs_is_kept_apart_from_idle_within_them_and_copies_are_neither() -> None:
    idle = idle_of(by_step(overlapped()))
    assert idle.between_steps == pytest.approx(6 / 100)
    assert idle.within_steps == pytest.approx(1 / 100)


def test_steps_without_graphs_count_from_their_first_activity_to_their_last() -> None:
    events: list[Event] = []
    for index in range(2):
        begin = 100.0 * index
        events.append(mark(begin, 50))
        for kernel in range(5):
            launch = 10 * index + kernel
            events += [call(begin + kernel, launch, "cudaLaunchKernel")]
            events += [ran(begin + 200 + 10 * kernel, 9, launch)]
    idle = idle_of(by_step(map(dict, events)))
    assert idle.between_steps == pytest.approx((100 - 49) / 100)
    assert idle.within_steps == pytest.approx(4 / 100)


def test_work_on_another_stream_is_no_idle_time() -> None:
    events = [*overlapped(), dict(call(30.0, 77)), dict(ran(1080, 30, 77, "other stream"))]
    # all of the first gap is covered, the second one is as before
    assert idle_of(by_step(events)).between_steps == pytest.approx((0 + 6) / 200)


class FakeProfile:
    """Of a GPU: what it exports was written before."""

    events: list[dict[str, Any]]

    def __init__(self, **_: object) -> None: ...

    def __enter__(self) -> "FakeProfile":
        return self

    def __exit__(self, *_: object) -> None: ...

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text(json.dumps({"traceEvents": self.events}))


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setattr("tandem.bench.engine.profile.profile", FakeProfile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    return Setting(torch.device("cuda:0"), 3, 1, 1e-3, torch.bfloat16)


def test_on_a_gpu_the_first_steps_of_a_profile_do_not_count(on_a_gpu: Setting) -> None:
    slow = [mark(-900, 50), call(-890, 5), ran(-800, 1000, 5, "while the profiler settles")]
    FakeProfile.events = [*map(dict, slow), *overlapped()]
    found, idle = profiled(lambda: 4, on_a_gpu)
    assert "over 3 steps" in found[0]
    assert "settles" not in str(found)
    assert idle is not None and idle.between_steps == pytest.approx(6 / 100)


def test_a_profile_that_found_nothing_on_the_gpu_is_no_profile(on_a_gpu: Setting) -> None:
    FakeProfile.events = [dict(mark(0, 50)), dict(mark(100, 50))]
    with pytest.raises(RuntimeError, match="no steps on the GPU"):
        profiled(lambda: 2, on_a_gpu)


def test_on_a_cpu_the_operators_are_what_is_listed() -> None:
    def run() -> int:
        with torch.profiler.record_function(STEP_MARK):
            torch.ones(64, 64) @ torch.ones(64, 64)
        return 1

    found, idle = profiled(run, setting_for("cpu"))
    assert idle is None and "idle" not in found[0]
    assert any("aten::mm" in line for line in found)
    assert not any(STEP_MARK in line for line in found)
