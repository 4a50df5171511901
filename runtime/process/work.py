"""Long work of this process, as those who show it elsewhere are told of it."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple


class Work(NamedTuple):
    """The progress of long work at one moment."""

    line: str
    share: float | None  # done, 0 to 1; None: unknown


_listeners: list[Callable[[Work | None], object]] = []


def on_work(listener: Callable[[Work | None], object]) -> Callable[[], None]:
    """Call `listener`, from any thread, for the work of every bar; return the undo function.

    Short work has no events. None: the work is over.
    """
    _listeners.append(listener)
    return partial(_listeners.remove, listener)


def tell(work: Work | None) -> None:
    """Call every listener."""
    for listener in _listeners.copy():
        listener(work)


def in_words(seconds: float) -> str:
    """Return a time with its unit: seconds up to two minutes, minutes up to two hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
