"""The parts of a step's time on the device: its kernels, and its idle time."""

import contextlib
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
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


@dataclass(frozen=True, slots=True)
class KernelShare:
    """A kernel's part of the device's busy time."""

    kernel: str
    num_calls: float  # per step
    ms: float  # per step
    share: float


@dataclass(frozen=True, slots=True)
class Profile:
    """The kernels of a step, longest first; of those that are not listed the sum."""

    num_steps: int
    step_ms: float  # of the device's time per step, while it was profiled
    idle_share: float | None  # of that, in which no kernel ran
    kernels: tuple[KernelShare, ...]
    others_ms: float

    def lines(self) -> list[str]:
        """Return the profile as lines for people."""
        idle = "" if self.idle_share is None else f", {self.idle_share:.1%} of it idle"
        return [
            f"{self.step_ms:.3g} ms a step over {self.num_steps} steps{idle}",
            *(
                f"{each.share:6.1%}  {each.ms:8.4f} ms  {each.num_calls:6.1f} calls  {each.kernel}"
                for each in self.kernels
            ),
            f"        {self.others_ms:8.4f} ms  all others",
        ]


def noted(figure: Figure, profile: Profile) -> Figure:
    """Return the figure with a profile of its steps in its notes."""
    return msgspec.structs.replace(figure, notes=(*figure.notes, *profile.lines()))


def profiled(run: Callable[[], int], setting: Setting) -> tuple[Profile, Idle | None]:
    """Return the kernels of `run` and, on a GPU, its idle time.

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


def profile_of(steps: Sequence[Sequence[Activity]]) -> Profile:
    """Return the kernels' shares of the device's time in these steps."""
    total_us: defaultdict[str, float] = defaultdict(float)
    num_calls: Counter[str] = Counter()
    everything = _in_order(steps)
    for activity in everything:
        total_us[activity.name] += activity.end_us - activity.start_us
        num_calls[activity.name] += 1
    begin = min(each.start_us for each in everything)
    end = max(each.end_us for each in everything)
    idle_us = _idle_us(everything, begin, end)
    return _profile(
        total_us, num_calls, len(steps), (end - begin) / len(steps), idle_us / (end - begin)
    )


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


def _of_operators(found: Any, num_steps: int) -> Profile:
    """Return PyTorch's operators on a CPU, by their own time."""
    total_us: defaultdict[str, float] = defaultdict(float)
    num_calls: Counter[str] = Counter()
    for average in found.key_averages():
        if average.key != STEP_MARK:
            total_us[average.key] += average.self_cpu_time_total
            num_calls[average.key] += average.count
    return _profile(total_us, num_calls, num_steps, sum(total_us.values()) / num_steps, None)


def _profile(
    total_us: dict[str, float],
    num_calls: Counter[str],
    num_steps: int,
    step_us: float,
    idle_share: float | None,
) -> Profile:
    all_us = sum(total_us.values()) or 1.0
    ranked = sorted(total_us.items(), key=lambda item: -item[1])
    kernels = tuple(_share(name, us, num_calls[name], num_steps, all_us) for name, us in ranked)
    return Profile(
        num_steps=num_steps,
        step_ms=step_us / 1e3,
        idle_share=idle_share,
        kernels=kernels[:NUM_LISTED],
        others_ms=sum(each.ms for each in kernels[NUM_LISTED:]),
    )


def _share(name: str, us: float, count: int, num_steps: int, all_us: float) -> KernelShare:
    return KernelShare(name[:MAX_NAME], count / num_steps, us / 1e3 / num_steps, us / all_us)
