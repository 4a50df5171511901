"""When each stage of a request happened, and what lies between the stages."""

import math
import time
from collections.abc import Mapping
from typing import Literal

Stage = Literal[
    "received", "queued", "claimed", "prefix_pulled", "computed", "first_write", "last_write",
    "first_token", "landed", "verified", "first_step",
]  # fmt: skip
Course = Literal["local", "remote", "fallback"]

# What a prefill worker may say of itself; everything else is the decode worker's own to mark.
PREFILL_STAGES: tuple[Stage, ...] = ("prefix_pulled", "computed", "first_write", "last_write")
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

        A stage before the construction counts as received.
        """
        if stage not in self._marks:
            elapsed_s = (time.perf_counter() if at is None else at) - self.started_at
            self._marks[stage] = max(0.0, elapsed_s * 1e3)

    def merge(self, stages_ms: Mapping[str, float], origin: Stage) -> None:
        """Take over a prefill worker's stages, which count from our mark of `origin`.

        Stages that are not a prefill worker's are dropped, and so are times that cannot be: before
        the origin, in the future, not a number.
        """
        origin_ms = self._marks.get(origin)
        if origin_ms is None:
            return
        most_ms = self.elapsed_s() * 1e3 - origin_ms + _CLOCK_SLACK_MS
        for stage in PREFILL_STAGES:
            ms = stages_ms.get(stage, math.nan)
            if 0 <= ms <= most_ms:
                self._marks.setdefault(stage, origin_ms + ms)

    def elapsed_s(self) -> float:
        """Seconds since construction."""
        return time.perf_counter() - self.started_at

    def ms(self) -> dict[str, float]:
        """Stage |-> milliseconds since construction, to the microsecond, in order of time."""
        return {stage: round(ms, 3) for stage, ms in sorted(self._marks.items(), key=_by_time)}

    def since(self, origin: Stage) -> dict[str, float]:
        """Stage |-> milliseconds since the mark of `origin`, for the stages after it."""
        origin_ms = self._marks.get(origin, math.inf)
        return {
            stage: round(ms - origin_ms, 3)
            for stage, ms in sorted(self._marks.items(), key=_by_time)
            if ms >= origin_ms and stage != origin
        }


def _by_time(mark: tuple[str, float]) -> float:
    return mark[1]


def course(stages_ms: Mapping[str, float]) -> Course:
    """Whether a prompt was never offered, came by a handoff, or was taken back from one."""
    if "verified" in stages_ms:
        return "remote"
    return "fallback" if "queued" in stages_ms or "claimed" in stages_ms else "local"


def intervals_ms(stages_ms: Mapping[str, float]) -> dict[str, float]:
    """Interval |-> milliseconds; those of a request taken back from a handoff mean nothing: none.

    A begin and an end that two hosts marked can be a message's time off: never below zero.
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
