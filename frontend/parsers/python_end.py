"""The end of a Python list in a growing text."""

import re

_OUTSIDE = re.compile(r"[\"'{}\[\]()]")
_INSIDE = {quote: re.compile(rf"\\.|{quote}", re.DOTALL) for quote in "\"'"}


class PythonEnd:
    """Finds the end of a list, whose strings have quotes of either kind."""

    __slots__ = ("_depth", "_num_read", "_quote")

    def __init__(self) -> None:
        self._depth = 0
        self._num_read = 0
        self._quote = ""  # of the string that is open

    def find(self, text: str) -> int:
        """Return the length of the list at the start of `text`, which grows; -1: it goes on."""
        while (
            found := (_INSIDE[self._quote] if self._quote else _OUTSIDE).search(
                text, self._num_read
            )
        ) is not None:
            self._num_read = found.end()
            mark = found[0]
            if self._quote:
                self._quote = "" if mark == self._quote else self._quote
            elif mark in _INSIDE:
                self._quote = mark
            else:
                self._depth += 1 if mark in "([{" else -1
                if self._depth <= 0:
                    return self._num_read
        # A backslash at the end escapes a character that is still to come.
        self._num_read = len(text) - (text.endswith("\\") and bool(self._quote))
        return -1
