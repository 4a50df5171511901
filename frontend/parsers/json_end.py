"""The end of a JSON value in a growing text."""

import re

_OUTSIDE = re.compile(r'["{}\[\]]|[^\s\w,:.+\-]')
_INSIDE = re.compile(r'["\\]')


class JsonEnd:
    """Finds the end of an object or a list. Each character is read once."""

    __slots__ = ("_depth", "_is_escaped", "_is_in_string", "is_whole")

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self.is_whole = False

    def feed(self, text: str) -> int:
        """Return the length of the part of `text` that is of the value; -1: all, and it goes on.

        The value also ends, without being whole, before a character that JSON cannot have there.
        """
        place = 0
        while place < len(text):
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            found = (_INSIDE if self._is_in_string else _OUTSIDE).search(text, place)
            if self._depth == 0 and (found is None or found.start() > place):
                return place  # not an object
            if found is None:
                break
            place = found.end()
            if not self._take(found[0]):
                return found.start()
            if self._depth == 0:
                self.is_whole = True
                return place
        return -1

    def _take(self, character: str) -> bool:
        """Take one that has a meaning here. Returns False for one that cannot stand here."""
        if self._is_in_string:
            self._is_escaped = character == "\\"
            self._is_in_string = character != '"'
        elif character in "{[":
            self._depth += 1
        elif character in "}]" and self._depth:
            self._depth -= 1
        elif character == '"' and self._depth:
            self._is_in_string = True
        else:
            return False
        return True
