"""The parts of a step's time on the device: its kernels, and its idle time."""

import contextlib
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.autograd.profiler import profile

from tandem.bench.report.figures import Figure
from tandem.bench.report.setting import Setting

STEP_MARK = "tandem.bench step"  # the name of a step's launch in a profile
NUM_LISTED = 8
MAX_NAME = 60
WARM_PART = 4  # of the steps one in so many, at first, in which the profiler itself settles
MAIN_SHARE = 0.5  # of a step's activities, that the launch of its graph has at least
DEVICE_CATEGORIES = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
RUNTIME_CATEGORIES = frozenset(("cuda_runtime", "cuda_driver"))


@dataclass(frozen=True, slots=True)
class Activity:
    """A kernel or copy that ran on the device; times in microseconds of the profile's clock."""

    name: str
    start_us: float
    end_us: float
    launch: int  # the call that started it, which for a graph is one for all its kernels


@dataclass(frozen=True, slots=True)
class Idle:
    """The idle shares of the time from the first step's start to the last one's."""

    between_steps: float
    within_steps: float


def noted(figure: Figure, profile: Sequence[str]) -> Figure:
    """Return the figure with a profile of its steps in its notes."""
    return msgspec.structs.replace(figure, notes=(*figure.notes, *profile))


def profiled(run: Callable[[], int], setting: Setting) -> tuple[list[str], Idle | None]:
    """Return the kernels of `run` as lines for people and, on a GPU, its idle time.

    `run` returns the number of its steps; each is marked by its launch. Raises RuntimeError when
    the profiler found no step on a GPU.
    """
    if setting.is_dry:
        with profile() as found:
            num_steps = run()
        return _of_operators(found, num_steps), None
    # Not torch.profiler's: that one imports a compiler first, for seconds.
    with profile(use_device="cuda", use_kineto=True) as found:
        run()
        torch.cuda.synchronize(setting.device)
    with tempfile.TemporaryDirectory(prefix="tandem-profile-") as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        steps = by_step(json.loads(path.read_bytes())["traceEvents"])
    steps = steps[len(steps) // WARM_PART :]
    if len(steps) < 2:
        raise RuntimeError("the profiler found no steps on the GPU")
    return profile_of(steps), idle_of(steps)


def by_step(events: Iterable[dict[str, Any]]) -> list[list[Activity]]:
    """Return the activities of each marked step, in order of time, from a trace of Chrome's format.

    An activity belongs to the step during whose mark the host launched it.
    """
    marks: list[tuple[float, float]] = []
    launched_at: dict[int, float] = {}
    activities: list[Activity] = []
    for event in events:
        category = str(event.get("cat", "")).lower()
        if category == "user_annotation" and event.get("name") == STEP_MARK:
            marks.append((event["ts"], event["ts"] + event["dur"]))
        elif category in RUNTIME_CATEGORIES:
            with contextlib.suppress(KeyError):
                launched_at[event["args"]["correlation"]] = event["ts"]
        elif category in DEVICE_CATEGORIES:
            start_us, launch = float(event["ts"]), event["args"]["correlation"]
            activities.append(Activity(event["name"], start_us, start_us + event["dur"], launch))
    marks.sort()
    steps: list[list[Activity]] = [[] for _ in marks]
    for activity in sorted(activities, key=lambda each: each.start_us):
        at = launched_at.get(activity.launch)
        for step, (begin, end) in zip(steps, marks, strict=True):
            if at is not None and begin <= at < end:
                step.append(activity)
    return [step for step in steps if step]


def idle_of(steps: Sequence[Sequence[Activity]]) -> Idle:
    """Return the idle shares; between steps is from the end of one's graph to the next one's start.

    Copies of inputs and tokens are no idle time. A step without a graph counts from its first
    activity to its last.
    """
    everything = _in_order(steps)
    mains = [_main(step) for step in steps]
    span_us = mains[-1][0] - mains[0][0]
    between = sum(
        _idle_us(everything, before[1], after[0])
        for before, after in pairwise(mains)
        if after[0] > before[1]
    )
    within = sum(_idle_us(everything, begin, end) for begin, end in mains[:-1])
    return Idle(between / span_us, within / span_us)


def profile_of(steps: Sequence[Sequence[Activity]]) -> list[str]:
    """Return the kernels' shares of the device's time in these steps, as lines for people."""
    total_us: defaultdict[str, float] = defaultdict(float)
    everything = _in_order(steps)
    for activity in everything:
        total_us[activity.name] += activity.end_us - activity.start_us
    begin = min(each.start_us for each in everything)
    end = max(each.end_us for each in everything)
    idle_share = _idle_us(everything, begin, end) / (end - begin)
    step_ms = (end - begin) / 1e3 / len(steps)
    first = f"{step_ms:.3g} ms a step over {len(steps)} steps, {idle_share:.1%} of it idle"
    num_calls = Counter(each.name for each in everything)
    return [first, *_kernel_lines(total_us, num_calls, len(steps))]


def _in_order(steps: Iterable[Sequence[Activity]]) -> list[Activity]:
    return sorted((each for step in steps for each in step), key=lambda each: each.start_us)


def _main(step: Sequence[Activity]) -> tuple[float, float]:
    """Return begin and end of the main launch, if that is most of the step; else of the step."""
    (launch, count), *_ = Counter(each.launch for each in step).most_common(1)
    part = [each for each in step if each.launch == launch]
    if count < MAIN_SHARE * len(step):
        part = list(step)
    return min(each.start_us for each in part), max(each.end_us for each in part)


def _idle_us(activities: Iterable[Activity], begin: float, end: float) -> float:
    """Return the part of [begin, end) that no activity covers; they are in order of start."""
    idle, covered = 0.0, begin
    for activity in activities:
        start, stop = max(activity.start_us, begin), min(activity.end_us, end)
        if stop <= covered:
            continue
        if start >= end:
            break
        idle += max(0.0, start - covered)
        covered = stop
    return idle + max(0.0, end - covered)


def _of_operators(found: Any, num_steps: int) -> list[str]:
    """Return PyTorch's operators on a CPU, by their own time."""
    averages = [each for each in found.key_averages() if each.key != STEP_MARK]
    total_us = {each.key: each.self_cpu_time_total for each in averages}
    num_calls = Counter({each.key: each.count for each in averages})
    step_ms = sum(total_us.values()) / 1e3 / num_steps
    first = f"{step_ms:.3g} ms a step over {num_steps} steps"
    return [first, *_kernel_lines(total_us, num_calls, num_steps)]


def _kernel_lines(
    total_us: Mapping[str, float], num_calls: Counter[str], num_steps: int
) -> Iterator[str]:
    """Yield a line for each of the longest kernels of a step, and one for the others together."""
    ranked = sorted(total_us.items(), key=lambda item: -item[1])
    all_us = sum(total_us.values()) or 1.0
    for name, us in ranked[:NUM_LISTED]:
        ms, calls = us / 1e3 / num_steps, num_calls[name] / num_steps
        yield f"{us / all_us:6.1%}  {ms:8.4f} ms  {calls:6.1f} calls  {name[:MAX_NAME]}"
    others_ms = sum(us for _, us in ranked[NUM_LISTED:]) / 1e3 / num_steps
    yield f"        {others_ms:8.4f} ms  all others"
