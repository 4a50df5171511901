"""Fixed texts in a growing text."""

import re
from collections.abc import Collection


class Marks:
    """Finds the first of some marks, and the place where one may have begun."""

    __slots__ = ("_first", "_longest", "_pattern", "_prefixes")

    def __init__(self, marks: Collection[str]) -> None:
        longest_first = sorted(marks, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._prefixes = {mark[:end] for mark in marks for end in range(1, len(mark))}
        self._longest = max(map(len, self._prefixes), default=0)
        self._first = re.compile("|".join(re.escape(mark[0]) for mark in marks) or r"(?!)")

    def may_begin_in(self, text: str) -> bool:
        """Return False if no mark begins in `text`."""
        return self._first.search(text) is not None

    def find(self, text: str, *, is_end: bool) -> tuple[int, str | None]:
        """Return the place of the first mark, and the mark.

        The mark is None at the end of the text, and where a mark may have begun that more text
        decides on; there is no more after the end.
        """
        found = self._pattern.search(text)
        if not is_end:
            for place in range(max(0, len(text) - self._longest), len(text)):
                if found is not None and found.start() < place:
                    break
                if text[place:] in self._prefixes:
                    return place, None
        return (len(text), None) if found is None else (found.start(), found[0])
