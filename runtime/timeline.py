"""When each stage of a request happened."""

import time


class Timeline:
    """Milliseconds from construction to each marked stage, on this host's monotonic clock."""

    __slots__ = ("_marks", "_start")

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._marks: dict[str, float] = {}

    def mark(self, stage: str) -> None:
        """Record that `stage` happened now; the first mark of a stage stands."""
        self._marks.setdefault(stage, (time.perf_counter() - self._start) * 1e3)

    def elapsed_s(self) -> float:
        """Seconds since construction."""
        return time.perf_counter() - self._start

    def ms(self) -> dict[str, float]:
        """Stage |-> milliseconds, in the order of marking; a copy."""
        return dict(self._marks)
