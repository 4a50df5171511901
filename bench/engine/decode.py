"""Decode steps through engine and runner: their time, its parts, and the device's idle time."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tandem.bench.engine.floors import decode_bytes
from tandem.bench.engine.profile import Idle, noted, profiled
from tandem.bench.engine.rig import Rig, StepRecord, Workshop, engine_log, intervals_s
from tandem.bench.engine.setting import num_rounds, target_for
from tandem.bench.report.figures import (
    Bound,
    Figure,
    at_least,
    at_most,
    flat,
    in_unit,
    medians,
    percentile,
)
from tandem.bench.report.setting import Setting

NUM_WARM_STEPS = 8
NUM_PROFILED_STEPS, NUM_PROFILED_DRY = 24, 2
# On an H200 in ms, elsewhere as the share of the floor that they are there.
TARGETS = {
    (1, 1024): (at_most(4.2, 3.9), at_least(0.848, 0.913, "share")),
    (128, 1024): (at_most(9.5, 8.9), at_least(0.843, 0.9, "share")),
}
IDLE_TARGET = at_most(3.0, 1.0)


@dataclass(slots=True)
class Point:
    """A batch size and a length of context, and the steps measured of it, round by round."""

    num_seqs: int
    context: int
    rounds: list[list[StepRecord]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"decode_b{self.num_seqs}_ctx{self.context}"

    @property
    def label(self) -> str:
        return f"decode step, B {self.num_seqs}, context {self.context}"


def run(setting: Setting) -> Iterator[Figure]:
    """Measure every point; points take turns within each round."""
    workshop = Workshop(setting)
    started_at = time.perf_counter()
    with engine_log() as lines:
        rig = workshop.rig(max_num_seqs=setting.size(128, 4))
    yield Figure(
        "decode_ready",
        "runner built, graphs captured",
        "s",
        (time.perf_counter() - started_at,),
        notes=("weights in memory already", *lines),
    )
    points, num_steps = points_of(setting), setting.size(96, 4)
    fitting = [point for point in points if _fits(rig, point, num_steps)]
    yield from (_too_large(rig, point) for point in points if point not in fitting)
    yield from (_step_figure(rig, point, setting) for point in fitting)  # announced
    yield from decode_steps(rig, fitting, num_steps, setting)
    for point in fitting:
        if setting.is_dry or (point.num_seqs, point.context) in TARGETS:
            yield from profile_steps(rig, point, setting)


def points_of(setting: Setting) -> list[Point]:
    if setting.is_dry:
        return [Point(1, 32), Point(4, 32)]
    small = [Point(num_seqs, 1024) for num_seqs in (1, 8, 32, 64)]
    return small + [Point(128, context) for context in (1024, 2048, 4096)]


def decode_steps(
    rig: Rig, points: Sequence[Point], num_steps: int, setting: Setting
) -> Iterator[Figure]:
    """Measure every point in every round; its context is reached in the middle of a round."""
    for index in range(setting.num_warmups + num_rounds(setting)):
        for point in points:
            records = measure(rig, point, num_steps)
            if index >= setting.num_warmups:
                point.rounds.append(records)
    for point in points:
        yield _step_figure(rig, point, setting)
        p99_ms = 1e3 * percentile((each.device_s for each in flat(point.rounds)), 0.99)
        yield Figure(f"{point.name}_p99", f"{point.label}, p99", "ms", (p99_ms,))
        yield _idle_by_events(point)


def measure(rig: Rig, point: Point, num_steps: int) -> list[StepRecord]:
    """Return `num_steps` steps of sequences that are placed for them."""
    rig.place(point.num_seqs, point.context - num_steps // 2)
    try:
        rig.decode(NUM_WARM_STEPS)
        return rig.decode(num_steps)
    finally:
        rig.clear()


def profile_steps(rig: Rig, point: Point, setting: Setting) -> Iterator[Figure]:
    """Yield the kernels of a point's steps, and the GPU's idle time between them."""
    num_steps = setting.size(NUM_PROFILED_STEPS, NUM_PROFILED_DRY)
    rig.place(point.num_seqs, point.context - num_steps)
    try:
        rig.decode(NUM_WARM_STEPS)
        profile, idle = profiled(lambda: len(rig.decode(num_steps)), setting)
    finally:
        rig.clear()
    if point.rounds:
        yield noted(_step_figure(rig, point, setting), profile)
    if idle is not None:
        yield from _idle(point, idle)


def _idle(point: Point, idle: Idle) -> Iterator[Figure]:
    for name, words, share, target in (
        ("idle", "between decode steps", idle.between_steps, IDLE_TARGET),
        ("idle_within", "within a step, between its kernels", idle.within_steps, None),
    ):
        label = f"GPU idle {words}, B {point.num_seqs}"
        yield Figure(f"{point.name}_{name}", label, "%", (100 * share,), target)


def _step_figure(rig: Rig, point: Point, setting: Setting) -> Figure:
    """Return the device's time of a step; its floor is that of the contexts that were measured."""
    steps = flat(point.rounds)
    num_tokens: float = point.num_seqs * point.context
    if steps:
        num_tokens = statistics.fmean(record.num_context_tokens for record in steps)
    targets = TARGETS.get((point.num_seqs, point.context))
    return Figure(
        point.name,
        point.label,
        "ms",
        in_unit(medians([each.device_s for each in steps] for steps in point.rounds), "ms"),
        target_for(setting, *targets) if targets else None,
        bound=Bound("read", decode_bytes(rig.model, num_tokens)),
        notes=(f"drawn at temperature 1; {len(steps)} steps",),
    )


def _idle_by_events(point: Point) -> Figure:
    """Return the share of the time from tokens to tokens that lies in no step."""
    shares = []
    for records in point.rounds:
        whole = sum(intervals_s(records))
        shares.append(100 * max(0.0, 1 - sum(each.device_s for each in records[1:]) / whole))
    return Figure(
        f"{point.name}_idle_by_events",
        f"time in no step's events, B {point.num_seqs}, context {point.context}",
        "%",
        tuple(shares),
    )


def _fits(rig: Rig, point: Point, num_steps: int) -> bool:
    # besides: half a round, the scheduler's reserve, the last block of each
    block_size = rig.runner.kv_caches[0].block_size
    longest = point.context + num_steps + NUM_WARM_STEPS + 2 * block_size
    return 1.02 * point.num_seqs * longest <= rig.num_slots


def _too_large(rig: Rig, point: Point) -> Figure:
    return Figure(
        point.name,
        point.label,
        "ms",
        notes=(f"not on this GPU: the KV pool holds {rig.num_slots} tokens",),
    )
