"""Progress lines for the user: a spinner on a terminal, plain lines elsewhere."""

import contextlib
import time
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from tandem.runtime.process.progress import LINE_INTERVAL_S

NO_TERMINAL_WIDTH = 240


def wide_console() -> Console:
    """Return a console for tables: as wide as the terminal, and wide in a file or pipe.

    Texts of other processes are shown as they are, without markup.
    """
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = NO_TERMINAL_WIDTH
    return console


class Reporter:
    """Progress of a launch on standard error, results on standard output.

    A launch outlives its terminal: lines for one that was closed are lost, and nothing else.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._output = Console(highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._started = self._progress_s = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def working(self, text: str) -> None:
        """Show the current activity: a spinner on a terminal, a line elsewhere."""
        if not self._console.is_terminal:
            self._line(f"... {escape(text)}")
        elif self._status is None:
            self._status = self._console.status(escape(text))
            with contextlib.suppress(OSError):
                self._status.start()
        else:
            with contextlib.suppress(OSError):
                self._status.update(escape(text))

    def progress(self, text: str) -> None:
        """Show how far the current activity is; elsewhere than on a terminal now and then."""
        now_s = time.perf_counter()
        if self._console.is_terminal or now_s - self._progress_s >= LINE_INTERVAL_S:
            self._progress_s = now_s
            self.working(text)

    def done(self, text: str) -> None:
        """Print a milestone and the time since the start."""
        elapsed_s = time.perf_counter() - self._started
        self._line(f"[green]ok[/]  {escape(text)} [dim]({elapsed_s:.1f} s)[/]")

    def note(self, text: str) -> None:
        self._line(f"[dim]--[/]  {escape(text)}")

    def warn(self, text: str) -> None:
        self._line(f"[yellow]!![/]  {escape(text)}")

    def output(self, text: str) -> None:
        """Print a result on standard output, unchanged."""
        self._clear()
        with contextlib.suppress(OSError):
            self._output.print(text, markup=False)

    def _line(self, markup: str) -> None:
        with contextlib.suppress(OSError):
            self._console.print(markup)

    def _clear(self) -> None:
        if self._status is not None:
            with contextlib.suppress(OSError):
                self._status.stop()
            self._status = None
