"""The work that one rendering may do, counted before it is done.

A template is a program of the model's author, and one operation of it may be without a bound
(`'a' * 10**10`). So each operation pays for its result before there is one, in characters of text
and entries of lists and dicts. That bounds time and memory of a rendering, without a process of its
own, whose messages would cost every chat more than all these checks.
"""

import re
import threading
import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sized, ValuesView
from typing import Any

MAX_RESULT = 16 * 2**20  # of one operation, which holds Python's lock for some 20 ms then
WORK_PER_S = 128 * 2**20
MAX_WIDTH = 4096  # of a padded text
_ENTRY = 16  # characters are copied in the time in which an entry is looked at
_NESTED: tuple[type[Any], ...] = (
    list,
    tuple,
    dict,
    set,
    frozenset,
    KeysView,
    ValuesView,
    ItemsView,
)
_SPEC = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?[hlL]?.", re.DOTALL)
_LONG_NUMBER = re.compile(r"\d{5}|\{[^{}]*\{")  # of `str.format`, also a width by another field


class TooMuchWorkError(Exception):
    """The rendering needs more work than its time allows."""


class Size:
    """The size of a value with all that is in it, as often as it is in it."""

    __slots__ = ("depth", "num_characters", "num_entries")

    def __init__(self) -> None:
        self.num_characters = self.num_entries = 0
        self.depth = 1

    @property
    def total(self) -> int:
        return self.num_characters + self.num_entries


class Work(threading.local):
    """The work left for the rendering of this thread; none outside of one."""

    left = 0
    end_s = 0.0

    def begin(self, limit_s: float, variables: Mapping[str, Any]) -> None:
        """Allow the work of `limit_s` of this thread's CPU time.

        What is in lists of `variables`, which nothing changes meanwhile, is measured once.
        """
        self.left = int(limit_s * WORK_PER_S)
        self.end_s = time.thread_time() + limit_s
        lists = [each for each in variables.values() if isinstance(each, list)]
        self._given: dict[int, Size | None] = {id(each): None for some in lists for each in some}

    def end(self) -> None:
        """Allow no more work."""
        self.left = 0
        self._given = {}

    def check_time(self) -> None:
        """Raise TooMuchWorkError when the time is over."""
        if time.thread_time() > self.end_s:
            raise TooMuchWorkError

    def spend(self, size: int) -> None:
        """Pay for an operation with a result of `size`. Raises TooMuchWorkError."""
        self.left -= size + 1
        if self.left < 0 or size > MAX_RESULT:
            raise TooMuchWorkError

    def paid(self, value: Any) -> Any:
        """Pay for a value that has been made, and return it."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, _NESTED):
            self.size(value)
        elif isinstance(value, Iterator):
            return self._paid_one_by_one(value)
        return value

    def _paid_one_by_one(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.spend(1)
            yield value

    def total(self, value: Any) -> int:
        """Return the size of a value; pay for each of its entries."""
        return len(value) if isinstance(value, str) else self.size(value).total

    def size(self, value: Any) -> Size:
        """Return the size of a value. Raises TooMuchWorkError above that of a result."""
        size = Size()
        level = [value]
        while level:
            inner: list[Any] = []
            for each in level:
                self._add(each, size, inner)
                if size.total > MAX_RESULT:
                    raise TooMuchWorkError
            level = inner
            size.depth += 1
        return size

    def _add(self, value: Any, size: Size, inner: list[Any]) -> None:
        """Add what stands in `value` itself, and the nested values in it to `inner`."""
        if isinstance(value, str):
            size.num_characters += len(value)
        if not isinstance(value, _NESTED):
            return
        self.spend(_ENTRY * len(value))
        size.num_entries += 1 + len(value)
        for item in (*value, *value.values()) if isinstance(value, dict) else value:
            if isinstance(item, str):
                size.num_characters += len(item)
            elif isinstance(item, _NESTED):
                if id(item) in self._given:
                    self._add_given(item, size)
                else:
                    inner.append(item)

    def _add_given(self, item: Any, size: Size) -> None:
        known = self._given.pop(id(item)) or self.size(item)
        self._given[id(item)] = known
        size.num_characters += known.num_characters
        size.num_entries += known.num_entries
        size.depth = max(size.depth, known.depth + 1)


def length(value: Any) -> int:
    """Return the length of a value; that of a number is one."""
    return len(value) if isinstance(value, Sized) else 1


def formatted_size(form: str, arguments_size: int) -> int:
    """Return the most that `form % arguments` has. Raises TooMuchWorkError for a wide field."""
    specs = _SPEC.findall(form)
    for width in (each for spec in specs for each in spec if each):
        if width == "*" or len(width) > 4 or int(width) > MAX_WIDTH:
            raise TooMuchWorkError
    return len(form) + len(specs) * (arguments_size + MAX_WIDTH * any(map(any, specs)))


def braces_size(form: str, arguments_size: int) -> int:
    """Return the most that `form.format(arguments)` has. Raises TooMuchWorkError likewise."""
    if _LONG_NUMBER.search(form):
        raise TooMuchWorkError
    return len(form) + form.count("{") * (arguments_size + 9999)
