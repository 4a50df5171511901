"""The pace of time in a process: with emulated devices it may be slower than that of the wall.

`set_pace` slows the functions of `time` that measure and sleep, and uvloop's timers, for modules of
ours and of libraries alike. So every interval, target, timeout and measured duration is in seconds
of the slow clock, whoever wrote it. The time of day, and clocks of other processes, stay as they
are: what those are given comes from `wall_seconds`.
"""

import time
from collections.abc import Callable
from typing import Any

_PERF_COUNTER, _MONOTONIC, _SLEEP = time.perf_counter, time.monotonic, time.sleep
_pace = 1.0


def wall_seconds(seconds: float) -> float:
    """Return the seconds of the wall's clock that `seconds` of this process's clock take."""
    return seconds * _pace


def set_pace(pace: float) -> None:
    """Let time run `pace` times slower from now on; called once, at the start of a process.

    All processes of a machine agree on the slow clock's reading. A name that a module imported from
    `time` before keeps its pace.
    """
    global _pace
    if pace == _pace:
        return
    _pace = pace
    _replace(time, "perf_counter", lambda: _PERF_COUNTER() / pace)
    _replace(time, "monotonic", lambda: _MONOTONIC() / pace)
    _replace(time, "sleep", lambda seconds: _SLEEP(seconds * pace))
    _slow_event_loops(pace)


def _slow_event_loops(pace: float) -> None:
    import uvloop  # not at the top: few processes have a pace, and uvloop takes a while to load

    base: Any = uvloop.Loop.__mro__[1]

    def call_later(
        loop: Any, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Any:
        return base.call_later(loop, delay * pace, callback, *args, context=context)

    _replace(uvloop.Loop, "time", lambda loop: base.time(loop) / pace)
    _replace(uvloop.Loop, "call_later", call_later)  # call_at calls it


def _replace(owner: object, name: str, function: Callable[..., object]) -> None:
    setattr(owner, name, function)
