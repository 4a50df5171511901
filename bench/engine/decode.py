"""Decode steps through engine and runner: their time, where it goes, and how often nothing runs."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from tandem.bench.engine.floors import decode_bytes
from tandem.bench.engine.profile import Seen, profiled
from tandem.bench.engine.rig import (
    Rig,
    StepRecord,
    Workshop,
    in_parts,
    intervals_s,
    said_by_the_engine,
)
from tandem.bench.engine.setting import goal_for, num_rounds
from tandem.bench.kernels.figures import Goal, Measurement
from tandem.bench.kernels.timing import Setting
from tandem.bench.report.figures import percentile

NUM_WARM_STEPS = 8
NUM_PROFILED_STEPS, NUM_PROFILED_DRY = 24, 2
# On an H200 in ms, elsewhere as the share of the floor that they are there.
GOALS = {
    (1, 1024): (Goal(4.2, 3.9), Goal(0.848, 0.913, "share")),
    (128, 1024): (Goal(9.5, 8.9), Goal(0.843, 0.9, "share")),
}
IDLE_GOAL = Goal(3.0, 1.0)


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


def run(setting: Setting) -> Iterator[Measurement]:
    """Points take turns within each round."""
    workshop = Workshop(setting)
    started_at = time.perf_counter()
    with said_by_the_engine() as lines:
        rig = workshop.rig(max_num_seqs=setting.size(128, 4))
    yield Measurement(
        name="decode_ready",
        label="runner built, graphs captured",
        unit="s",
        values=(time.perf_counter() - started_at,),
        note="; ".join(["weights in memory already", *lines]),
    )
    points, num_steps = points_of(setting), setting.size(96, 4)
    fitting = [point for point in points if _fits(rig, point, num_steps)]
    yield from (_too_large(rig, point) for point in points if point not in fitting)
    yield from (_measurement(rig, point, setting) for point in fitting)  # announced
    yield from in_parts(
        [
            ("decode", partial(decode_steps, rig, fitting, num_steps, setting)),
            *((f"profile of {p.name}", partial(profile, rig, p, setting)) for p in _ends(fitting)),
        ]
    )


def points_of(setting: Setting) -> list[Point]:
    if setting.is_dry:
        return [Point(1, 32), Point(4, 32)]
    small = [Point(num_seqs, 1024) for num_seqs in (1, 8, 32, 64)]
    return small + [Point(128, context) for context in (1024, 2048, 4096)]


def decode_steps(
    rig: Rig, points: Sequence[Point], num_steps: int, setting: Setting
) -> Iterator[Measurement]:
    """Every point in every round; the context is as long as asked for in the middle of a round."""
    for index in range(setting.num_warmups + num_rounds(setting)):
        for point in points:
            records = measure(rig, point, num_steps)
            if index >= setting.num_warmups:
                point.rounds.append(records)
    for point in points:
        yield _measurement(rig, point, setting)
        yield _worst(point)
        yield _idle_by_events(point)


def measure(rig: Rig, point: Point, num_steps: int) -> list[StepRecord]:
    """`num_steps` steps of sequences that are there for them alone."""
    rig.place(point.num_seqs, point.context - num_steps // 2)
    try:
        rig.decode(NUM_WARM_STEPS)
        return rig.decode(num_steps)
    finally:
        rig.clear()


def profile(rig: Rig, point: Point, setting: Setting) -> Iterator[Measurement]:
    """The kernels of a point's steps, and the GPU's idle time between them."""
    num_steps = setting.size(NUM_PROFILED_STEPS, NUM_PROFILED_DRY)
    rig.place(point.num_seqs, point.context - num_steps)
    try:
        rig.decode(NUM_WARM_STEPS)
        seen = profiled(lambda: len(rig.decode(num_steps)), setting)
    finally:
        rig.clear()
    if point.rounds:
        yield msgspec.structs.replace(_measurement(rig, point, setting), profile=seen.profile)
    yield from _idle(point, seen)


def _idle(point: Point, seen: Seen) -> Iterator[Measurement]:
    idle = seen.idle
    if idle is None:
        return
    yield Measurement(
        name=f"{point.name}_idle",
        label=f"GPU idle between decode steps, B {point.num_seqs}",
        unit="%",
        values=(100 * idle.between_steps,),
        goal=IDLE_GOAL,
    )
    yield Measurement(
        name=f"{point.name}_idle_within",
        label=f"GPU idle within a step, between its kernels, B {point.num_seqs}",
        unit="%",
        values=(100 * idle.within_steps,),
    )


def _measurement(rig: Rig, point: Point, setting: Setting) -> Measurement:
    """The device's time of a step; its floor is that of the contexts that were measured."""
    steps = [record for records in point.rounds for record in records]
    num_tokens: float = point.num_seqs * point.context
    if steps:
        num_tokens = statistics.fmean(record.num_context_tokens for record in steps)
    goals = GOALS.get((point.num_seqs, point.context))
    return Measurement(
        name=point.name,
        label=point.label,
        unit="ms",
        work=decode_bytes(rig.model, num_tokens),
        rate="read",
        seconds=tuple(
            statistics.median(record.device_s for record in records) for records in point.rounds
        ),
        goal=goal_for(setting, *goals) if goals else None,
        timed_by="the runner's own events around a step; median of a round's steps",
        note=f"drawn at temperature 1; {len(steps)} steps",
    )


def _worst(point: Point) -> Measurement:
    steps = [record.device_s for records in point.rounds for record in records]
    return Measurement(
        name=f"{point.name}_p99",
        label=f"{point.label}, p99",
        unit="ms",
        values=(percentile(steps, 0.99) * 1e3,),
    )


def _idle_by_events(point: Point) -> Measurement:
    """What of the time from token to token is no step's."""
    shares = []
    for records in point.rounds:
        whole = sum(intervals_s(records))
        shares.append(100 * max(0.0, 1 - sum(each.device_s for each in records[1:]) / whole))
    return Measurement(
        name=f"{point.name}_idle_by_events",
        label=f"time in no step's events, B {point.num_seqs}, context {point.context}",
        unit="%",
        values=tuple(shares),
    )


def _ends(points: Sequence[Point]) -> list[Point]:
    """The smallest and the largest batch, at the shortest context."""
    if not points:
        return []
    shortest = [point for point in points if point.context == points[0].context]
    return list({point.name: point for point in (shortest[0], shortest[-1])}.values())


def _fits(rig: Rig, point: Point, num_steps: int) -> bool:
    # besides: half a round, what the scheduler keeps free, the last block of each
    block_size = rig.runner.kv_caches[0].block_size
    longest = point.context + num_steps + NUM_WARM_STEPS + 2 * block_size
    return 1.02 * point.num_seqs * longest <= rig.num_slots


def _too_large(rig: Rig, point: Point) -> Measurement:
    return Measurement(
        name=point.name,
        label=point.label,
        unit="ms",
        unavailable=f"the KV pool holds {rig.num_slots} tokens",
        note="not on this GPU",
    )
