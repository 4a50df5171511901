"""JSON schemas as trees of schemas: their parts, and the paths of these; pure."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from tandem.runtime.printable import short

Path = tuple[str | int, ...]  # keys and indices, from the root
Schema = dict[str, Any]
_OF_ONE = frozenset(
    (
        "not", "if", "then", "else", "items", "additionalItems", "contains", "propertyNames",
        "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contentSchema",
    )
)  # fmt: skip
_OF_LIST = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_OF_MAP = frozenset(("properties", "patternProperties", "dependentSchemas", "dependencies"))
DEFINITIONS = ("$defs", "definitions")
_WHOLE = ("$defs", "whole")  # the place of a schema in the document of one of its parts
_NAME = re.compile(r"[A-Za-z_$][\w$-]*", re.ASCII)


def subschemas(schema: Any) -> Iterator[tuple[Path, Schema]]:
    """Yield the schemas right below a schema, with their paths; those that are true or false not.

    Definitions come last.
    """
    if not isinstance(schema, dict):
        return
    for key in (*(key for key in schema if key not in DEFINITIONS), *DEFINITIONS):
        value = schema.get(key)
        if isinstance(value, dict) and key in _OF_ONE:
            yield (key,), value
        elif isinstance(value, dict) and (key in _OF_MAP or key in DEFINITIONS):
            for name, each in value.items():
                if isinstance(each, dict):
                    yield (key, name), each
        elif isinstance(value, list) and key in _OF_LIST:
            for index, each in enumerate(value):
                if isinstance(each, dict):
                    yield (key, index), each


def changed(schema: Any, change: Callable[[Schema, Path], Schema], path: Path = ()) -> Any:
    """Return a schema with `change(schema, its path)` in place of each schema in it.

    A schema is changed before those below it.
    """
    if not isinstance(schema, dict):
        return schema
    return {
        key: _changed_value(value, key, change, (*path, key))
        for key, value in change(schema, path).items()
    }


def _changed_value(value: Any, key: str, change: Callable[[Schema, Path], Schema], at: Path) -> Any:
    if isinstance(value, dict):
        if key in _OF_ONE:
            return changed(value, change, at)
        if key in _OF_MAP or key in DEFINITIONS:
            return {name: changed(each, change, (*at, name)) for name, each in value.items()}
    elif isinstance(value, list) and key in _OF_LIST:
        return [changed(each, change, (*at, index)) for index, each in enumerate(value)]
    return value


def at(schema: Any, path: Path) -> Any:
    """Return the value at a path. Raises LookupError or TypeError where there is none."""
    for step in path:
        schema = schema[step]
    return schema


def put(schema: Any, path: Path, value: Any) -> Any:
    """Return a copy of a schema with another value at a path."""
    return _put(schema, path, value)


def _put(parent: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    copy = parent.copy()
    copy[path[0]] = _put(copy[path[0]], path[1:], value)
    return copy


class Parts:
    """The parts of a schema, each as one that stands alone: its references lead somewhere."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._whole = ""  # as JSON, with its references moved; made by the first that needs it

    def at(self, path: Path) -> str:
        """Return the JSON of the part at a path."""
        found = at(self._schema, path)
        if not path or not has_references(found):
            return json.dumps(found)
        key, name = _WHOLE
        if not self._whole:
            self._whole = json.dumps({name: changed(self._schema, _moved)})
        draft = self._schema.get("$schema")
        head = {"$schema": draft} if isinstance(draft, str) else {}
        document = json.dumps(head | {"$ref": pointer(_WHOLE + path)})
        return f'{document[:-1]}, "{key}": {self._whole}}}'


def part(schema: Any, path: Path) -> Any:
    """Return the schema at a path as one that stands alone."""
    return json.loads(Parts(schema).at(path)) if path else schema


def has_references(schema: Any) -> bool:
    """Return True if a schema, or one below it, refers to another one."""
    if isinstance(schema, dict):
        if any(key.endswith("ef") and key.startswith("$") for key in schema):
            return True
        return any(has_references(each) for _, each in subschemas(schema))
    return False


def _moved(schema: Schema, path: Path) -> Schema:
    """Return a schema that refers to what its document has in `_WHOLE`."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return schema
    return schema | {"$ref": pointer(_WHOLE) + reference[1:]}


def pointer(path: Path) -> str:
    """Return a reference to a path."""
    steps = (str(step).replace("~", "~0").replace("/", "~1") for step in path)
    return "#" + "".join(f"/{step.replace('%', '%25')}" for step in steps)


def path_of(reference: object, schema: Any) -> Path | None:
    """Return the path in `schema` that a reference leads to; None if there is none."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    path: Path = ()
    for step in reference[1:].split("/")[1:]:
        key: str | int = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and isinstance(key, str) and key.isdecimal():
            key = int(key)
        try:
            schema = schema[key]
        except (LookupError, TypeError):
            return None
        path += (key,)
    return path


def text_of(path: Path) -> str:
    """Return a path as it follows the name of a field: `.properties.city.enum[2]`."""
    return "".join(
        f"[{step}]"
        if isinstance(step, int)
        else f".{step}"
        if _NAME.fullmatch(step) and len(step) <= len(short(step))
        else f"[{short(step)!r}]"
        for step in path
    )


WHOLE = text_of(_WHOLE)  # the path of a schema in the document of one of its parts


def without(keyword: str, schema: Any) -> tuple[Any, list[Path]]:
    """Return a schema without a keyword, and the paths at which it stood."""
    paths: list[Path] = []

    def change(each: Schema, path: Path) -> Schema:
        if keyword not in each:
            return each
        paths.append((*path, keyword))
        return {key: value for key, value in each.items() if key != keyword}

    return changed(schema, change), paths
