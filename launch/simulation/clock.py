"""A clock that jumps from one event to the next."""

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """Events in order of their time; those of one time in the order in which they were set."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._is_stopped = False
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` when `seconds` have passed."""
        self.at(self.now_s + seconds, act)

    def at(self, when_s: float, act: Callable[[], None]) -> None:
        """Call `act` at `when_s`, which is not past."""
        heapq.heappush(self._events, (when_s, next(self._order), act))

    def run(self) -> None:
        """Go from event to event until none is left, or until `stop`."""
        while self._events and not self._is_stopped:
            self.now_s, _, act = heapq.heappop(self._events)
            act()

    def stop(self) -> None:
        """End `run` after the event that it is at."""
        self._is_stopped = True
