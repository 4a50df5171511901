"""Stop strings in a stream of text pieces."""


class StopMatcher:
    """Holds back text that may be the beginning of a stop string."""

    __slots__ = ("_held", "_stops", "_tail_length")

    def __init__(self, stops: list[str]) -> None:
        """`stops` are not empty strings."""
        self._stops = stops
        self._tail_length = max(map(len, stops)) - 1
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that can go out, and whether a stop string is complete (it ends there)."""
        text = self._held + text
        found = [index for stop in self._stops if (index := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        """The text held back, once no more can follow."""
        text, self._held = self._held, ""
        return text

    def _num_held(self, text: str) -> int:
        for length in range(min(self._tail_length, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
