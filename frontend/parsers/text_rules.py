"""Constraints of strings that stand without quotes: those that a grammar of text can keep."""

import re
from collections.abc import Iterator
from typing import Any

from tandem.runtime import json_schema
from tandem.runtime.json_schema import Path

_OF_STRINGS = ("pattern", "minLength", "maxLength")
_BRANCHES = ("allOf", "anyOf", "oneOf")
_MAX_DEPTH = 16  # of references and branches
# Anchors within a pattern, groups of other kinds than (?:, references to groups, word boundaries.
_UNKEPT = re.compile(r"(?<!\\)(?:\\\\)*(?:\$|(?<!\[)\^|\(\?(?!:)|\\[bBAZzG1-9])")
# Keywords of an object that arguments, one after another, do not keep.
_OF_OBJECTS = (
    *_BRANCHES, "not", "if", "const", "enum", "propertyNames", "minProperties", "maxProperties",
    "dependentRequired", "dependentSchemas", "dependencies",
)  # fmt: skip


def arguments_of(schema: Any) -> Path:
    """Return the path of the object of all arguments, which a schema may only refer to."""
    path: Path = ()
    for _ in range(_MAX_DEPTH):
        here = json_schema.at(schema, path)
        target = json_schema.path_of(here.get("$ref"), schema)
        if target is None or "properties" in here:
            break
        if not isinstance(json_schema.at(schema, target), dict):
            break
        path = target
    return path


def unkept_paths(whole: Any, path: Path) -> list[Path]:
    """Return the paths of the keywords that arguments without quotes do not keep.

    `path` is that of the object of all arguments.
    """
    here = json_schema.at(whole, path)
    found: list[Path] = [(*path, key) for key in _OF_OBJECTS if key in here]
    properties = here.get("properties")
    for name, schema in properties.items() if isinstance(properties, dict) else ():
        inner = (*path, "properties", name)
        is_kept = text_expression(schema) is not None
        places = _constraints(whole, schema, inner, 0)
        found += [place for place in places if place[:-1] != inner or not is_kept]
    return found


def _constraints(whole: Any, schema: Any, path: Path, depth: int) -> Iterator[Path]:
    """Yield the paths of keywords about strings that a value may be."""
    if not isinstance(schema, dict) or not _may_be_text(schema) or depth > _MAX_DEPTH:
        return
    yield from ((*path, key) for key in _OF_STRINGS if key in schema)
    for key in _BRANCHES:
        branches = schema.get(key)
        for index, each in enumerate(branches if isinstance(branches, list) else ()):
            yield from _constraints(whole, each, (*path, key, index), depth + 1)
    target = json_schema.path_of(schema.get("$ref"), whole)
    if target is not None:
        yield from _constraints(whole, json_schema.at(whole, target), target, depth + 1)


def _may_be_text(schema: dict[str, Any]) -> bool:
    types = schema.get("type", "string")
    return types == "string" or (isinstance(types, list) and "string" in types)


def text_expression(schema: Any, end: str = "") -> str | None:
    """Return the Lark expression of a string by its constraints; None where none can keep them.

    It is empty for a string without any. The string does not contain the tag `end`; one with a
    pattern contains no tag, because patterns without another text in them make large machines.
    """
    if not isinstance(schema, dict):
        return ""
    parts = []
    if "pattern" in schema:
        body = _whole_pattern(schema["pattern"])
        if body is None:
            return None
        parts += [f"/{body}/", "/[^<]*/"]
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        if type(least) is not int or (most != "" and type(most) is not int):
            return None
        parts.append(f"/(.|\\n){{{least},{most}}}/")
    if parts and "pattern" not in schema:
        parts.append(f"~/(.|\\n)*{for_slashes(re.escape(end))}(.|\\n)*/")
    return " & ".join(parts)


def _whole_pattern(pattern: object) -> str | None:
    """Return a pattern of whole texts, in one line; None for one that a terminal cannot have."""
    if not isinstance(pattern, str) or not pattern.isprintable():
        return None
    begin, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    body = pattern[begin : len(pattern) - end]
    try:
        re.compile(body)
    except (re.error, RecursionError, OverflowError):
        return None
    if "<" in body or _UNKEPT.search(body) or ((begin or end) and "|" in body):
        return None
    text = r"(.|\n)*"
    return f"{'' if begin else text}({for_slashes(body)}){'' if end else text}"


def for_slashes(regex: str) -> str:
    """Return a regex as it stands between two slashes, in one line."""
    escapes = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return re.sub(r"(?s)\\.|[/\n]", lambda found: escapes.get(found[0], found[0]), regex)
