"""Dynamo's wrapper around the items of an answer."""

from typing import Any


class Annotated:
    """One item of an answer. It is always data: the iteration raises errors."""

    __slots__ = ("_data",)

    def __init__(self, data: Any) -> None:
        self._data = data

    def data(self) -> Any:
        """Return the item: dict, list, string, number, None."""
        return self._data

    def id(self) -> str | None:
        """Return None."""
        return None

    def event(self) -> str | None:
        """Return None."""
        return None

    def comments(self) -> list[str]:
        """Return an empty list."""
        return []

    def is_error(self) -> bool:
        """Return False."""
        return False

    def __str__(self) -> str:
        return str(self._data)

    def __repr__(self) -> str:
        return f"Annotated({self._data!r})"
