"""The types that a JSON schema allows, and the value of an argument that is written without them.

In formats of XML an argument is bare text: `12` may be a number or a string. Its schema decides.
"""

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_MAX_DEPTH = 64  # of schemas within schemas
_MAX_PYTHON_CHARACTERS = 64 * 1024  # its parser keeps everything else waiting
_PYTHON = {"True": True, "False": False, "None": None}


class Allowed(msgspec.Struct, frozen=True):
    """The values that a schema allows: all of some types, and single ones of the others.

    An integer is a number too, so `types` with "number" have "integer".
    """

    types: frozenset[str] = _TYPES
    single: dict[str, Any] = {}  # by their JSON

    @property
    def is_text(self) -> bool:
        """True if a value may be any string, which stands without quotes then."""
        return "string" in self.types and self.types != _TYPES

    def takes(self, value: object) -> bool:
        """Return True for a value of these types, or one of the single ones."""
        return _type_of(value) in self.types or _json(value) in self.single

    def and_(self, other: "Allowed") -> "Allowed":
        """Return the values that both allow."""
        single = {key: each for key, each in self.single.items() if other.takes(each)}
        single |= {key: each for key, each in other.single.items() if self.takes(each)}
        return Allowed(self.types & other.types, single)

    def or_(self, other: "Allowed") -> "Allowed":
        """Return the values that one of them allows."""
        return Allowed(self.types | other.types, self.single | other.single)


_ANY = Allowed()
_NONE = Allowed(frozenset())
_TEXT = Allowed(frozenset({"string"}))


class ArgumentTypes:
    """The types of a function's arguments, by the schema of all of them.

    Each part of the schema is read once, however many references lead to it.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._whole = schema
        self._read: dict[int, Allowed] = {}  # by the id of a part of the schema

    def of(self, name: str) -> Allowed:
        """Return the values of an argument; text for one that the schema does not name."""
        found = [self.allowed_by(each) for each in self._named(self._whole, name, set())]
        if not found:
            return _TEXT
        allowed = found[0]
        for each in found[1:]:
            allowed = allowed.or_(each)
        return allowed if allowed.types or allowed.single else _ANY

    def _named(self, schema: object, name: str, seen: set[int]) -> Iterator[object]:
        """Yield the schemas of an argument: of alternatives, there is one for each."""
        if not isinstance(schema, Mapping) or id(schema) in seen or len(seen) > _MAX_DEPTH:
            return
        seen.add(id(schema))
        properties, more = schema.get("properties"), schema.get("additionalProperties")
        if isinstance(properties, Mapping) and name in properties:
            yield properties[name]
        elif isinstance(more, Mapping):
            yield more
        for part in (self._referred(schema), *_parts(schema, "allOf", "anyOf", "oneOf")):
            yield from self._named(part, name, seen)

    def allowed_by(self, schema: object, depth: int = 0) -> Allowed:
        """Return the values that a part of the schema allows, as far as types go."""
        if schema is False:
            return _NONE
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return _ANY
        if id(schema) not in self._read:
            self._read[id(schema)] = _NONE  # within itself it allows nothing more
            self._read[id(schema)] = self._allowed_by(schema, depth + 1)
        return self._read[id(schema)]

    def _allowed_by(self, schema: Mapping[str, Any], depth: int) -> Allowed:
        found = _of_types(schema.get("type"))
        if isinstance(schema.get("enum"), list):
            found = found.and_(_only(schema["enum"]))
        if "const" in schema:
            found = found.and_(_only([schema["const"]]))
        if "$ref" in schema:
            found = found.and_(self.allowed_by(self._referred(schema), depth))
        for part in _parts(schema, "allOf"):
            found = found.and_(self.allowed_by(part, depth))
        for key in ("anyOf", "oneOf"):
            union = _NONE
            for part in (parts := _parts(schema, key)):
                union = union.or_(self.allowed_by(part, depth))
            found = found.and_(union) if parts else found
        return found

    def _referred(self, schema: Mapping[str, Any]) -> object:
        """Return the part of the schema that a reference of `schema` names; None for none."""
        path = schema.get("$ref")
        if not isinstance(path, str) or not path.startswith("#"):
            return None
        found: Any = self._whole
        for part in path[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        return found


def _parts(schema: Mapping[str, Any], *keys: str) -> list[object]:
    return [part for key in keys if isinstance(schema.get(key), list) for part in schema[key]]


def _of_types(names: object) -> Allowed:
    given = names if isinstance(names, list) else [names]
    types = {name for name in given if isinstance(name, str) and name in _TYPES}
    if "number" in types:
        types.add("integer")
    return Allowed(frozenset(types)) if types else _ANY


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _only(values: list[Any]) -> Allowed:
    return Allowed(frozenset(), {_json(value): value for value in values})


def value_of(text: str, allowed: Allowed) -> Any:
    """Return the value that a text stands for; the text itself where it stands for no other."""
    bare = text.strip()
    is_null = bare == "null" and allowed.takes(None)
    if _json(text) in allowed.single or (allowed.is_text and not is_null):
        return text
    try:
        value = _read(bare)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text
    if isinstance(value, float) and value.is_integer() and not allowed.takes(value):
        value = int(value)
    return value if allowed.takes(value) else text


def _read(text: str) -> Any:
    """Return a value in JSON or in Python's notation. Raises ValueError among others."""
    if text in _PYTHON:
        return _PYTHON[text]
    try:
        return json.loads(text, parse_constant=_refuse)
    except ValueError:
        if text[:1] not in ("{", "[", "(") or len(text) > _MAX_PYTHON_CHARACTERS:
            raise
    return json.loads(json.dumps(ast.literal_eval(text), allow_nan=False))


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not of JSON")
