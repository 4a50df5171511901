"""The cost of each filter and text method in a chat template, by its arguments.

One without a rule here is not there.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tandem.frontend.tokens.template_work import (
    MAX_WIDTH,
    TooMuchWorkError,
    Work,
    braces_size,
    formatted_size,
    length,
)

work = Work()
_MAX_STRIPPED = 256  # characters to strip, each looked at for each of a text
_SLOW = 16  # times slower than to copy: regular expressions, sorting
_MAX_SEARCH = 2**28  # characters of a text times those that are looked for from its end

Rule = Callable[..., int]  # the size of a result from the arguments


def _unchecked(*_: Any, **__: Any) -> int:
    """Return nothing: the result is no larger than the value, but for a small factor."""
    return 0


def at_most(value: object, most: int) -> int:
    """Return nothing. Raises TooMuchWorkError for a larger number."""
    if isinstance(value, int | float) and value > most:
        raise TooMuchWorkError
    return 0


def _slow(value: Any, *_: Any, **__: Any) -> int:
    return _SLOW * length(value)


def _listed(values: Any, *_: Any, **__: Any) -> int:
    return _SLOW * length(values) + work.total(values)


def _grouped(values: Any, attribute: Any, default: Any = None, *_: Any, **__: Any) -> int:
    return _listed(values) + length(values) * length(default)


def _padded(value: Any, width: Any = 80, *_: Any) -> int:
    return length(value) + at_most(width, MAX_WIDTH)


def _indented(value: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    text = str(value)
    by = len(width) if isinstance(width, str) else max(int(width), 0)
    return len(text) + (1 + len(text.splitlines())) * by


def _joined(values: Any, d: Any = "", *_: Any, **__: Any) -> int:
    return work.total(values) + len(values) * length(d)


def _replaced(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    text, old = str(text), str(old)
    return len(text) + (text.count(old) if old else len(text) + 1) * length(new)


def _counted(_: Any, *args: Any, **named: Any) -> int:
    """Allow no number of parts, places or entries that is large."""
    return max([at_most(each, MAX_WIDTH) for each in (*args, *named.values())], default=0)


def _rounded(value: Any, precision: Any = 0, *_: Any, **__: Any) -> int:
    if not isinstance(value, int | float):  # it multiplies
        raise TooMuchWorkError
    return at_most(precision, MAX_WIDTH)


def _stripped(text: Any, chars: Any = None) -> int:
    return at_most(length(chars), _MAX_STRIPPED)


def _searched_back(text: Any, sep: Any = None, *_: Any, **__: Any) -> int:
    return at_most(length(sep) * length(text), _MAX_SEARCH)


def _summed(values: Any, attribute: Any = None, start: Any = 0) -> int:
    if not isinstance(start, int | float):
        raise TooMuchWorkError
    return length(values)


def _as_json(
    value: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: Any = False,
) -> int:
    size = work.size(value)
    by = len(indent) if isinstance(indent, str) else max(int(indent or 0), 0)
    between = sum(map(length, separators or ()))
    return size.total + by + size.num_entries * (by * size.depth + between)


def _tabs(text: str, tabsize: Any = 8) -> int:
    return len(text) + text.count("\t") * max(int(tabsize), 0)


def _formatted(form: Any, *arguments: Any, **named: Any) -> int:
    return formatted_size(str(form), work.total([arguments, named]))


def _in_braces(form: str, *arguments: Any, **named: Any) -> int:
    return braces_size(form, work.total([arguments, named]))


FILTERS: Mapping[str, Rule] = {
    **dict.fromkeys(
        (
            "abs", "attr", "count", "d", "default", "filesizeformat", "first", "float", "int",
            "items", "last", "length", "list", "lower", "map", "random", "reject", "rejectattr",
            "reverse", "safe", "select", "selectattr", "string", "upper",
        ),
        _unchecked,
    ),
    **dict.fromkeys(
        (
            "capitalize", "e", "escape", "forceescape", "striptags", "title", "truncate",
            "urlencode", "wordcount",
        ),
        _slow,
    ),
    **dict.fromkeys(("dictsort", "max", "min", "sort", "unique"), _listed),
    "batch": _counted, "center": _padded, "format": _formatted, "groupby": _grouped,
    "indent": _indented, "join": _joined, "replace": _replaced, "round": _rounded,
    "slice": _counted, "sum": _summed, "tojson": _as_json, "trim": _stripped,
}  # fmt: skip
OF_LISTS = (_joined, _listed, _grouped, _summed)  # an iterator is made a list for them
TEXT_METHODS: Mapping[str, Rule] = {
    **dict.fromkeys(
        (
            "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha",
            "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric",
            "isprintable", "isspace", "istitle", "isupper", "lower", "partition", "removeprefix",
            "removesuffix", "split", "splitlines", "startswith", "swapcase", "title", "upper",
        ),
        _unchecked,
    ),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
    **dict.fromkeys(("lstrip", "rstrip", "strip"), _stripped),
    **dict.fromkeys(("rfind", "rindex", "rpartition", "rsplit"), _searched_back),
    "expandtabs": _tabs, "format": _in_braces, "format_map": _in_braces,
    "join": lambda text, values: _joined(values, text), "replace": _replaced,
}  # fmt: skip
