"""JSON schemas as llguidance takes them, and the place of a fault in one."""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tandem.runtime import json_schema
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.json_schema import Path, Schema
from tandem.runtime.printable import one_line
from tandem.runtime.wire.messages import Grammar

# llguidance's. Any other is an annotation, as the specification of JSON Schema has it.
FORMATS = frozenset(
    (
        "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
        "unknown",
    )
)  # fmt: skip
_OPTIONS = "x-guidance"  # of llguidance, at the root; a client has none
_SEARCH_S = 0.25  # the longest search for a fault, within the time of a trial
_MAX_REASON_BYTES = 300
_JSON_IN_LARK = re.compile(r"%json\s*(?=\{|true\b)")
_NO_VALUE = "it allows no value, or refers to itself without an end"

_NO_VALUE = "allows no value, or refers to itself without an end"
_REASONS = (
    (re.compile(r"Unimplemented keys: .*"), "not supported"),
    (
        re.compile(r"oneOf constraints are not .*"),
        "its schemas may overlap, which is not supported; use anyOf",
    ),
    (re.compile(r"NoExtensionBias\b.*", re.DOTALL), _NO_VALUE),
    (re.compile(r"Unsatisfiable schema: (.*)", re.DOTALL), r"\1"),
    (re.compile(r"(?:invalid regex .*)?regex parse error:.*\nerror: (.*)", re.DOTALL), r"\1"),
    (re.compile(r"Resource '.*", re.DOTALL), "another document, which is not fetched"),
)

Refusal = Callable[[Any], str]  # the reason against a schema by itself; empty where it compiles
IsEmpty = Callable[[str], bool]  # of the texts that match a Lark expression


def prepared(schema: Any, is_empty: IsEmpty) -> Any:
    """Return a schema in the form that llguidance follows.

    It is without formats that llguidance does not know, without options of llguidance, and without
    patterns of names that are all in `properties`, after which no other name could follow.
    Raises ValueError for a schema that refers to nothing but itself.
    """
    if isinstance(schema, dict) and _OPTIONS in schema:
        schema = {key: value for key, value in schema.items() if key != _OPTIONS}

    def change(each: Schema, path: Path) -> Schema:
        if "$ref" in each:
            _check_end(each, schema)
        return _without_taken_patterns(_without_unknown_format(each), is_empty)

    return json_schema.changed(schema, change)


def _check_end(reference: Schema, schema: Any) -> None:
    """Raise ValueError for a reference to a reference, and so on, that comes back."""
    seen: list[Schema] = []
    while "$ref" in reference:
        if any(reference is each for each in seen):
            raise ValueError(_NO_VALUE)
        seen.append(reference)
        path = json_schema.path_of(reference["$ref"], schema)
        target = None if path is None else json_schema.at(schema, path)
        if not isinstance(target, dict):
            return
        reference = target


def _without_unknown_format(schema: Schema) -> Schema:
    format = schema.get("format")
    if "format" not in schema or (isinstance(format, str) and format in FORMATS):
        return schema
    return {key: value for key, value in schema.items() if key != "format"}


def _without_taken_patterns(schema: Schema, is_empty: IsEmpty) -> Schema:
    """Return a schema with each pattern in `properties` that matches nothing but names there."""
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    if not isinstance(properties, dict) or not isinstance(patterns, dict):
        return schema
    named, left = dict(properties), dict(patterns)
    for pattern, value in patterns.items():
        taken = _names_of(pattern, properties)
        if taken and is_empty(_other_names(pattern, taken)):
            del left[pattern]
            named |= {name: {"allOf": [named[name], value]} for name in taken}
    # In a schema with an empty object of patterns a comma could come after the last name.
    rest = {key: value for key, value in schema.items() if key != "patternProperties"}
    return rest | {"properties": named} | ({"patternProperties": left} if left else {})


def _names_of(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a pattern of whole names matches; none for another pattern."""
    if not (pattern.startswith("^") and pattern.endswith("$")):
        return []
    try:
        return [name for name in names if name.isprintable() and re.search(pattern, name)]
    except re.error:
        return []


def _other_names(pattern: str, taken: list[str]) -> str:
    """Return a Lark expression of the texts that a pattern matches, without some names."""
    names = "|".join(map(re.escape, taken)).replace("/", r"\/")
    return f"/{pattern[1:-1].replace('/', '[/]')}/ & ~/{names}/"


def schemas_in_lark(lark: str) -> Iterator[tuple[int, int, Any]]:
    """Yield start, end and value of each schema in a Lark grammar. Raises ValueError."""
    end = 0
    while (found := _JSON_IN_LARK.search(lark, end)) is not None:
        schema, end = json.JSONDecoder().raw_decode(lark, found.end())
        yield found.end(), end, schema


def fault_of(grammar: Grammar, error: InvalidRequestError, refusal: Refusal) -> InvalidRequestError:
    """Return the error of a grammar, or, where a schema in it is at fault, that of the schema.

    The field of such an error is `grammar`, the place of the schema in the grammar (the line of a
    Lark grammar, the field of a structural tag), and the path of the fault in the schema.
    """
    deadline = time.perf_counter() + _SEARCH_S
    try:
        for place, schema in _schemas_of(grammar):
            if time.perf_counter() > deadline:
                break
            if reason := refusal(schema):
                path = _Search(schema, reason, refusal, deadline).path()
                field = f"grammar{place}{json_schema.text_of(path)}"
                return InvalidRequestError(_readable(reason), param=field)
    except (ValueError, TypeError, LookupError, RecursionError):
        pass  # the grammar has another fault
    return error


def _readable(reason: str) -> str:
    for pattern, text in _REASONS:
        if pattern.fullmatch(reason):
            return one_line(pattern.sub(text, reason), _MAX_REASON_BYTES)
    return one_line(reason, _MAX_REASON_BYTES)


def _schemas_of(grammar: Grammar) -> Iterator[tuple[str, Any]]:
    """Yield the schemas of a grammar, with their places in it."""
    match grammar.kind:
        case "json_schema":
            yield "", json.loads(grammar.source)
        case "lark":
            for start, _, schema in schemas_in_lark(grammar.source):
                yield f"[{1 + grammar.source.count(chr(10), 0, start)}]", schema
        case "structural_tag":
            for index, each in enumerate(json.loads(grammar.source)["structures"]):
                yield f".structures[{index}].schema", each.get("schema", True)
        case _:
            return


class _Search:
    """A search for the smallest part of a schema that is refused for the reason of the whole."""

    def __init__(self, schema: Any, reason: str, refusal: Refusal, deadline: float) -> None:
        self._schema = schema
        self._reason = reason
        self._refusal = refusal
        self._deadline = deadline
        self._seen: set[Path] = set()  # parts that are refused

    def path(self) -> Path:
        """Return the path of that part, or of the keyword in it that the reason is about."""
        leaf = self._leaf(()) or ()
        key = self._keyword(leaf)
        return leaf if key is None else (*leaf, key)

    def _leaf(self, path: Path) -> Path | None:
        """Return a part that is refused and has none below it that is; None if all were seen."""
        self._seen.add(path)
        is_leaf = True
        for part in self._parts(path):
            if part in self._seen:
                is_leaf = False
            elif self._is_refused(part):
                is_leaf = False
                if (found := self._leaf(part)) is not None:
                    return found
        return path if is_leaf else None

    def _parts(self, path: Path) -> list[Path]:
        """Return the paths of the schemas right below one, and of the one that it refers to."""
        here = json_schema.at(self._schema, path)
        if not isinstance(here, dict):
            return []
        steps = (step for step, _ in json_schema.subschemas(here))
        parts = [path + step for step in steps if step[0] not in json_schema.DEFINITIONS]
        target = json_schema.path_of(here.get("$ref"), self._schema)
        return parts if target is None or target == path else [*parts, target]

    def _is_refused(self, path: Path) -> bool:
        """Return True if the part at `path` is refused for the reason; False out of time."""
        if time.perf_counter() > self._deadline:
            return False
        return self._refusal(json_schema.part(self._schema, path)) == self._reason

    def _keyword(self, path: Path) -> str | None:
        """Return the keyword without which the part at `path` is not refused for the reason."""
        here = json_schema.at(self._schema, path)
        # A type comes last: without it, most reasons fall away.
        for key in sorted(here, key="type".__eq__) if isinstance(here, dict) else ():
            if time.perf_counter() > self._deadline:
                return None
            rest = {name: value for name, value in here.items() if name != key}
            without = json_schema.put(self._schema, path, rest)
            if key in json_schema.DEFINITIONS:
                continue
            if self._refusal(json_schema.part(without, path)) != self._reason:
                return str(key)
        return None
