"""Calls that are JSON: the text of an object, or of a list of them, to names and arguments."""

import json
from collections.abc import Mapping
from typing import Any

from tandem.frontend.parsers.syntaxes import ReadCall


def unquoted(text: str) -> str:
    """Return the value of a JSON string, or its text where that is no JSON."""
    try:
        return str(json.loads(text))
    except ValueError:
        return text[1:-1]


def object_calls(text: str, *, is_bare: bool) -> list[ReadCall]:
    """Return the calls in an object or a list of objects; none if one of them is no call."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = [
        _object_call(each, is_bare) for each in (value if isinstance(value, list) else [value])
    ]
    return [call for call in calls if call is not None] if None not in calls else []


def _object_call(value: Any, is_bare: bool) -> ReadCall | None:
    """Return the call in an object. An answer that is an object is only one with arguments."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    if is_bare and not {"arguments", "parameters"} & value.keys():
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        return value["name"], arguments
    return value["name"], json.dumps({} if arguments is None else arguments, ensure_ascii=False)
