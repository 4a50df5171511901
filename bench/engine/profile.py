"""Where the time of a step goes: what ran on the device, by kernel, and when nothing did."""

import contextlib
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile

from tandem.bench.kernels.figures import KernelShare, Profile
from tandem.bench.kernels.timing import Setting

STEP_MARK = "tandem.bench step"  # what the launch of a step is called in a profile
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
    """Shares of the time from the first step's start to the last one's, in which nothing ran."""

    between_steps: float
    within_steps: float


@dataclass(frozen=True, slots=True)
class Seen:
    """What a profile shows: the table of kernels and, of a GPU, its idle time."""

    profile: Profile
    idle: Idle | None


def profiled(run: Callable[[], int], setting: Setting) -> Seen:
    """Profiles `run`, which gives the number of steps that it took; each is marked by its launch.

    Raises RuntimeError when the profiler saw nothing on a GPU.
    """
    if setting.is_dry:
        with profile() as found:
            num_steps = run()
        return Seen(_of_operators(found, num_steps), None)
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
        raise RuntimeError("the profiler saw no steps on the GPU")
    return Seen(profile_of(steps), idle_of(steps))


def by_step(events: Iterable[dict[str, Any]]) -> list[list[Activity]]:
    """The activities of each marked step, in order of time, from a trace in Chrome's format.

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
    """Between steps counts from the end of one's graph to the start of the next one's.

    What runs there besides, such as copies of inputs and tokens, is no idleness. A step without a
    graph counts from its first activity to its last.
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
    """The kernels' shares of the device's time in these steps."""
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


def profile_text(label: str, found: Profile) -> str:
    """The profile as lines for people."""
    idle = "" if found.idle_share is None else f", {found.idle_share:.1%} of it idle"
    lines = [f"{label}: {found.step_ms:.3g} ms a step over {found.num_steps} steps{idle}"]
    lines += [
        f"  {each.share:6.1%}  {each.ms:8.4f} ms  {each.num_calls:6.1f} calls  {each.kernel}"
        for each in found.kernels
    ]
    if found.others_ms > 0:
        lines.append(f"          {found.others_ms:8.4f} ms  all others")
    return "\n".join(lines)


def _in_order(steps: Iterable[Sequence[Activity]]) -> list[Activity]:
    return sorted((each for step in steps for each in step), key=lambda each: each.start_us)


def _main(step: Sequence[Activity]) -> tuple[float, float]:
    """Begin and end of what one launch started, if that is most of the step; else of all of it."""
    (launch, count), *_ = Counter(each.launch for each in step).most_common(1)
    part = [each for each in step if each.launch == launch]
    if count < MAIN_SHARE * len(step):
        part = list(step)
    return min(each.start_us for each in part), max(each.end_us for each in part)


def _idle_us(activities: Iterable[Activity], begin: float, end: float) -> float:
    """Of [begin, end), what no activity covers; they come in order of their start."""
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
    """On a CPU: PyTorch's operators by their own time."""
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
