"""Moments at which the event loop of a process stands, and the call that it stands in.

While the loop stands no stream of the process goes on. Twenty times a second the loop notes that it
runs, and a thread looks less often whether it did: 3 ms a second of an idle core, and no difference
that shows on a busy one.
"""

import asyncio
import logging
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Self

from tandem.runtime.process.metrics import counter, gauge

logger = logging.getLogger(__name__)

STOOD_S = 0.05
PERIOD_S = 0.05
_WARN_S = 1.0  # a busy machine alone may cause less
_LOG_EVERY_S = 10.0
_MAX_CALLS = 64  # that the metric names
_ROOT = str(Path(__file__).parents[2]) + "/"
_NO_CALL = "no call"  # the loop waits for a core, or for Python's lock
_WAITS = ("threading.py", "queue.py", "selectors.py", "socket.py", "thread.py")


class LoopMetrics:
    """The metrics of the event loop: the time that it stood, and its tasks."""

    def __init__(self) -> None:
        self.stood = counter(
            "event_loop_stood_seconds", "Time that the event loop stood, by call", ["call"]
        )
        self.tasks = gauge("event_loop_tasks", "Tasks of the event loop that have not ended")


class LoopWatch:
    """Logs and counts each time that the running event loop stands for `STOOD_S` or more."""

    def __init__(self) -> None:
        self._metrics = LoopMetrics()
        self._calls: set[str] = set()
        self._call = ""  # that the loop stands in now
        self._others = ""  # calls of other threads at that time
        self._ended = threading.Event()
        self._next_log_s = 0.0
        self._num_unlogged = 0
        self._thread = threading.Thread(target=self._look, name="tandem-watch", daemon=True)

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._metrics.tasks.set_function(lambda: len(asyncio.all_tasks(self._loop)))
        self._loop_thread = threading.get_ident()
        self._note_next(time.perf_counter())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._timer.cancel()

    def _note_next(self, now_s: float) -> None:
        self._due_s = now_s + PERIOD_S
        self._timer = self._loop.call_later(PERIOD_S, self._note)

    def _note(self) -> None:
        """Note that the loop runs, and whether it stood. On the loop."""
        now_s = time.perf_counter()
        late_s = now_s - self._due_s
        if late_s >= STOOD_S:
            self._stood(late_s, now_s)
        self._call = self._others = ""
        self._note_next(now_s)

    def _stood(self, late_s: float, now_s: float) -> None:
        call = self._call or _NO_CALL
        if call not in self._calls and len(self._calls) >= _MAX_CALLS:
            call = "other"
        self._calls.add(call)
        self._metrics.stood.labels(call.partition(":")[0]).inc(late_s)
        if now_s < self._next_log_s:
            self._num_unlogged += 1
            return
        level = logging.WARNING if late_s >= _WARN_S else logging.INFO
        more = f", and {self._num_unlogged} times before" if self._num_unlogged else ""
        beside = f" beside {self._others}" if self._others else ""
        logger.log(
            level, "the event loop stood for %.0f ms in %s%s%s", late_s * 1e3, call, beside, more
        )
        self._num_unlogged = 0
        self._next_log_s = now_s + _LOG_EVERY_S

    def _look(self) -> None:
        """Note the calls while the loop is late. On a thread of its own."""
        while not self._ended.wait(max(PERIOD_S, self._due_s + STOOD_S - time.perf_counter())):
            if not self._call and time.perf_counter() - self._due_s > STOOD_S:
                frames = sys._current_frames()
                own = frames.pop(self._loop_thread, None)
                del frames[threading.get_ident()]
                others = [_call_of(each) for each in frames.values() if not _waits(each)]
                self._others = ", ".join(sorted(others)[:4])
                self._call = _NO_CALL if own is None or _waits(own) else _call_of(own)
                del frames, own


def _waits(frame: FrameType) -> bool:
    return frame.f_code.co_filename.endswith(_WAITS)


def _call_of(frame: FrameType) -> str:
    """Return the innermost call of ours as `folder/file.py function:line`."""
    ours: FrameType | None = frame
    while ours is not None and not ours.f_code.co_filename.startswith(_ROOT):
        ours = ours.f_back
    ours = ours or frame
    path = ours.f_code.co_filename.removeprefix(_ROOT)
    return f"{path} {ours.f_code.co_name}:{ours.f_lineno}"
