"""Stop strings in a growing text."""


class StopMatcher:
    """Finds stop strings, and holds back text that may be the beginning of one."""

    __slots__ = ("_held", "_is_shown", "_stops", "_tail_length", "found")

    def __init__(self, stops: list[str], *, is_shown: bool = False) -> None:
        """Look for `stops`, none of which is empty. One that `is_shown` ends within the text."""
        self._stops = stops
        self._is_shown = is_shown
        self._tail_length = max(map(len, stops)) - 1
        self._held = ""
        self.found: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that can go out, and True when a stop string ends the text there."""
        text = self._held + text
        found = [(index, stop) for stop in self._stops if (index := text.find(stop)) >= 0]
        if found:
            self._held = ""
            index, self.found = min(found)
            return text[: index + len(self.found) if self._is_shown else index], True
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        """Return the text held back, at the end of the text."""
        text, self._held = self._held, ""
        return text

    def _num_held(self, text: str) -> int:
        for length in range(min(self._tail_length, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
