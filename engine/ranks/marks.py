"""Marks of how far a rank is: steps that have ended, and layers whose K/V is stored before that."""

import threading
from collections import deque
from dataclasses import dataclass

import torch

Mark = tuple[int, int]  # a step's number and its layers, in the order in which each rank stores
ALL_LAYERS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class MarkedEvent:
    """Rank 0's event of K/V, None on a CPU, and the mark of the same K/V at the other ranks."""

    mark: Mark
    event: torch.cuda.Event | None

    def query(self) -> bool:
        """Return True once it has happened at rank 0."""
        return self.event is None or self.event.query()  # type: ignore[no-untyped-call]


class StepMarks:
    """The marks that a rank's device has passed: recorded on one thread, asked for on another."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._passed: Mark = (0, 0)
        self._ahead = deque[tuple[Mark, torch.cuda.Event]]()  # launched work, in stream order
        self._lock = threading.Lock()

    def record(self, mark: Mark) -> None:
        """Note that the mark is passed once all that the current stream was given has ended."""
        if not self._on_gpu:
            with self._lock:
                self._passed = mark
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        with self._lock:
            self._ahead.append((mark, event))
            self._look()

    def has_passed(self, mark: Mark) -> bool:
        """Return True once this mark, or a later one, is passed; of steps to come too."""
        with self._lock:
            self._look()
            return self._passed >= mark

    def _look(self) -> None:
        while self._ahead and self._ahead[0][1].query():  # type: ignore[no-untyped-call]
            self._passed, _ = self._ahead.popleft()
