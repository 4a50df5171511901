"""Grammars of every kind, each with a check of its own for the answers that follow it."""

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from tandem.runtime.wire.messages import Grammar


class Case(NamedTuple):
    """A grammar whose answers all end, and the check that knows nothing of grammars."""

    grammar: Grammar
    is_valid: Callable[[str], bool]


def _person(text: str) -> bool:
    found = json.loads(text)
    return (
        found.keys() == {"name", "age", "tags"}
        and isinstance(found["name"], str)
        and len(found["name"]) <= 6
        and isinstance(found["age"], int)
        and 0 <= found["age"] <= 150
        and len(found["tags"]) <= 2
        and set(found["tags"]) <= {"a", "é", 7, None}
    )


def _sum(text: str) -> bool:
    return re.fullmatch(r"[0-9]( ?[+*] ?[0-9]){0,5}", text) is not None


def _tagged(text: str) -> bool:
    parts = re.split(r"<call>(.*?)</call>", text, flags=re.DOTALL)
    return all(isinstance(json.loads(part), bool) for part in parts[1::2])


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é", 7, None]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TAGS = {
    "structures": [{"begin": "<call>", "schema": {"type": "boolean"}, "end": "</call>"}],
    "triggers": ["<call>"],
}
CASES = {
    "json_schema": Case(Grammar("json_schema", json.dumps(PERSON)), _person),
    "regex": Case(
        Grammar("regex", "[a-f]{2,5}@(x|yy)\\.(org|com)"),
        lambda text: re.fullmatch(r"[a-f]{2,5}@(x|yy)\.(org|com)", text) is not None,
    ),
    "lark": Case(
        Grammar("lark", 'start: DIGIT (" "? ("+" | "*") " "? DIGIT){0,5}\nDIGIT: /[0-9]/'), _sum
    ),
    "gbnf": Case(
        Grammar("gbnf", 'root ::= item | item "," item\nitem ::= "no" | "[" [a-c]? "]"'),
        lambda text: re.fullmatch(r"(no|\[[a-c]?\])(,(no|\[[a-c]?\]))?", text) is not None,
    ),
    "structural_tag": Case(Grammar("structural_tag", json.dumps(TAGS)), _tagged),
}
