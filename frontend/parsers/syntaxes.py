"""Calls that are read as a whole: the text between two marks to names and arguments."""

import ast
import json
import re
from collections.abc import Callable
from typing import Any

from tandem.frontend.parsers.formats import Syntax

ReadCall = tuple[str, str]  # name, arguments as JSON
_MAX_PYTHON_CHARACTERS = 64 * 1024  # its parser keeps everything else waiting
_GEMMA_CALL = re.compile(r"\s*call:([\w.\-]+)\s*(\{.*\})\s*", re.DOTALL)
_GEMMA_QUOTES = re.compile(r'<\|"\|>|<escape>')
_BARE_KEY = re.compile(r"([A-Za-z_][\w.\-]*)\s*:")


def read_calls(syntax: Syntax | None, text: str) -> list[ReadCall]:
    """Return the calls in the text between two marks; none if it does not parse."""
    try:
        return _READERS[syntax](text) if syntax in _READERS else []
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []


def _python(text: str) -> list[ReadCall]:
    if len(text) > _MAX_PYTHON_CHARACTERS:
        return []
    calls: list[ReadCall] = []
    for statement in ast.parse(text.strip()).body:
        if not isinstance(statement, ast.Expr):
            return []
        value = statement.value
        for each in value.elts if isinstance(value, ast.List) else [value]:
            if not isinstance(each, ast.Call) or each.args:
                return []
            arguments = {str(word.arg): ast.literal_eval(word.value) for word in each.keywords}
            calls.append((ast.unparse(each.func), _dump(arguments)))
    return calls


def _gemma(text: str) -> list[ReadCall]:
    found = _GEMMA_CALL.fullmatch(text)
    if found is None:
        return []
    parts = _GEMMA_QUOTES.split(found[2])
    parts[::2] = [_BARE_KEY.sub(r'"\1":', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    return [(found[1], _dump(json.loads("".join(parts))))]


def _dump(arguments: dict[str, Any]) -> str:
    """Return JSON. Raises ValueError for values that JSON does not have."""
    try:
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise ValueError(str(error)) from error


_READERS: dict[Syntax, Callable[[str], list[ReadCall]]] = {
    "python": _python,
    "gemma": _gemma,
}
