"""Keys of a terminal, one at a time, without their echo."""

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator

# bytes of a key |-> its name
_NAMES = {b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"\x04": "q"}
_OTHERS = {"k": "up", "j": "down", "Q": "q"}


@contextlib.contextmanager
def keys(on_key: Callable[[str], None]) -> Iterator[None]:
    """Call `on_key` with the name of each key while the body runs.

    Standard input is a terminal, and has its settings back afterwards. An input that ends is `q`.
    """
    loop, terminal = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        try:
            found = os.read(terminal, 64)
        except OSError:  # the terminal has gone
            found = b""
        for name in names(found):
            on_key(name)
        if not found:
            loop.remove_reader(terminal)

    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        loop.add_reader(terminal, read)
        yield
    finally:
        loop.remove_reader(terminal)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def names(found: bytes) -> list[str]:
    """Return the names of the keys in one read; an input that has ended is `q`."""
    if not found:
        return ["q"]
    if (name := _NAMES.get(found)) is not None:
        return [name]
    if found.startswith(b"\x1b"):
        return []
    return [_OTHERS.get(letter, letter) for letter in found.decode("ascii", "ignore")]
