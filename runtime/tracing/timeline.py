"""The time of each stage of a request, and the intervals between stages."""

import math
import time
from collections.abc import Mapping
from operator import itemgetter
from typing import Literal

Stage = Literal[
    "received", "queued", "claimed", "prefix_pulled", "computed", "first_write", "last_write",
    "first_token", "landed", "verified", "first_step",
]  # fmt: skip
Course = Literal["local", "remote", "fallback"]

# The stages that a prefill worker may report; the decode worker marks the others.
PREFILL_STAGES: tuple[Stage, ...] = ("prefix_pulled", "computed", "first_write", "last_write")
_BY_TIME = itemgetter(1)
_CLOCK_SLACK_MS = 50.0  # two hosts' clocks run at rates that differ by parts in a million

# name |-> (the stages it can begin at, best first; the stage it ends at)
LOCAL_INTERVALS: Mapping[str, tuple[tuple[Stage, ...], Stage]] = {
    "prefill": (("received",), "first_token"),
    "second_token": (("first_token",), "first_step"),
}
HANDOFF_INTERVALS: Mapping[str, tuple[tuple[Stage, ...], Stage]] = {
    "placement": (("received",), "queued"),
    "queue": (("queued",), "claimed"),
    "prefix_pull": (("claimed",), "prefix_pulled"),
    "compute": (("prefix_pulled", "claimed"), "computed"),
    "answer": (("computed",), "first_token"),
    "exposed_transfer": (("computed",), "landed"),
    "verification": (("landed",), "verified"),
    "first_step": (("verified",), "first_step"),
}


class Timeline:
    """Milliseconds from construction to each marked stage, on this host's monotonic clock."""

    __slots__ = ("_marks", "started_at")

    def __init__(self) -> None:
        self.started_at = time.perf_counter()
        self._marks: dict[str, float] = {"received": 0.0}

    def mark(self, stage: Stage, at: float | None = None) -> None:
        """Record that `stage` happened now, or `at` a perf_counter reading; the first mark stands.

        A time before the construction counts as that of `received`.
        """
        if stage not in self._marks:
            elapsed_s = (time.perf_counter() if at is None else at) - self.started_at
            self._marks[stage] = round(max(0.0, elapsed_s * 1e3), 3)

    def merge(self, stages_ms: Mapping[str, float], origin: Stage) -> None:
        """Take over a prefill worker's stages, whose times count from the mark of `origin`.

        Other stages are dropped, and so are impossible times: before the origin, in the future,
        not a number.
        """
        origin_ms = self._marks.get(origin)
        if origin_ms is None:
            return
        most_ms = self.elapsed_s() * 1e3 - origin_ms + _CLOCK_SLACK_MS
        for stage in PREFILL_STAGES:
            ms = stages_ms.get(stage, math.nan)
            if 0 <= ms <= most_ms:
                self._marks.setdefault(stage, round(origin_ms + ms, 3))

    @property
    def marks(self) -> Mapping[str, float]:
        """Stage |-> milliseconds since construction, in the order in which they were recorded."""
        return self._marks

    def elapsed_s(self) -> float:
        """Return the seconds since construction."""
        return time.perf_counter() - self.started_at

    def ms(self) -> dict[str, float]:
        """Return stage |-> milliseconds since construction, rounded to µs, in order of time."""
        return in_order(self._marks)

    def since(self, origin: Stage) -> dict[str, float]:
        """Return stage |-> milliseconds since the mark of `origin`, for the stages after it."""
        origin_ms = self._marks.get(origin, math.inf)
        return {
            stage: round(ms - origin_ms, 3)
            for stage, ms in self.ms().items()
            if ms >= origin_ms and stage != origin
        }


def in_order(stages_ms: Mapping[str, float]) -> dict[str, float]:
    """Return the stages in order of time."""
    return dict(sorted(stages_ms.items(), key=_BY_TIME))


def course(stages_ms: Mapping[str, float]) -> Course:
    """Return how a prompt was computed; `fallback` is locally, after a handoff that failed."""
    if "verified" in stages_ms:
        return "remote"
    return "fallback" if "queued" in stages_ms or "claimed" in stages_ms else "local"


def intervals_ms(stages_ms: Mapping[str, float]) -> dict[str, float]:
    """Return interval |-> milliseconds, never below zero; none for a fallback.

    A begin and an end marked on two hosts can be off by the time of a message.
    """
    kind = course(stages_ms)
    if kind == "fallback":
        return {}
    found: dict[str, float] = {}
    for name, (begins, end) in (HANDOFF_INTERVALS if kind == "remote" else LOCAL_INTERVALS).items():
        begin = next((stage for stage in begins if stage in stages_ms), None)
        if begin is not None and end in stages_ms:
            found[name] = max(0.0, stages_ms[end] - stages_ms[begin])
    return found
