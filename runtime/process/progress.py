"""Progress of long work on standard error: a bar on a terminal, a line now and then elsewhere.

Both have the elapsed and the remaining time, and so have the events for other processes.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tandem.runtime.process.work import Work, in_words, tell

SHOWN_AFTER_S = 2.0  # shorter work has no bar
LINE_INTERVAL_S = 5.0
EVENT_INTERVAL_S = 1.0


class ProgressBar:
    """The progress of work, to be entered while it goes on.

    The size of the work is `total`; without one there is no remaining time. It can be left and
    entered again: the elapsed time counts from its construction. Lines go to `on_line` where that
    is given, such as the log of a worker. Other output to `console` stands above the bar.
    """

    def __init__(
        self,
        label: str,
        total: float | None = None,
        on_line: Callable[[str], object] | None = None,
        console: Console | None = None,
    ) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24))
        times = (TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        detail = TextColumn("{task.fields[detail]}", markup=False)
        self._bar = Progress(*columns, *times, detail, console=self._console, transient=True)
        self._bar.add_task(label, total=total, detail="")
        (self._task,) = self._bar.tasks
        self._started_s = self._line_s = self._event_s = time.perf_counter()
        self._has_told = False
        self._lock = threading.Lock()
        self._on_line = on_line or partial(self._console.print, soft_wrap=True, markup=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar.live.is_started:
            self._bar.stop()
        if self._has_told:
            self._has_told = False
            tell(None)

    def advance(self, amount: float = 1.0) -> None:
        """Add to the work that is done; threads may call it."""
        self._bar.update(self._task.id, advance=amount)
        self._show()

    def update(self, done: float, detail: str = "") -> None:
        """Set the work that is done, and some words about it."""
        self._bar.update(self._task.id, completed=done, detail=detail)
        self._show()

    def line(self) -> str:
        """Return the progress as one line."""
        task = self._task
        left_s = task.time_remaining
        parts = [
            f"{task.description}: {in_words(time.perf_counter() - self._started_s)}",
            f"{task.percentage:.0f} %" if task.total else "",
            f"about {in_words(left_s)} left" if left_s is not None and not task.finished else "",
            task.fields["detail"],
        ]
        return ", ".join(part for part in parts if part)

    def _show(self) -> None:
        now_s = time.perf_counter()
        with self._lock:
            if self._console.is_terminal:
                if now_s - self._started_s >= SHOWN_AFTER_S:
                    self._bar.start()
            elif now_s - self._line_s >= LINE_INTERVAL_S:
                self._line_s = now_s
                self._on_line(self.line())
            is_long = now_s - self._started_s >= SHOWN_AFTER_S
            if is_long and now_s - self._event_s >= EVENT_INTERVAL_S:
                self._event_s, self._has_told = now_s, True
                share = self._task.percentage / 100 if self._task.total else None
                tell(Work(self.line(), share))
