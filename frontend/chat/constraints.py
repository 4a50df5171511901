"""The fields of a body that constrain its answer, and the grammar that one of them stands for."""

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.frontend.bodies.invalid import invalid_field
from tandem.frontend.chat.origins import OF_CHAT, Origins
from tandem.frontend.chat.sampling import SamplingFields
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.json_schema import WHOLE, text_of, without
from tandem.runtime.printable import short
from tandem.runtime.wire.messages import Grammar

_MAX_CHOICES = 1024
_ANY_OBJECT = '{"type": "object"}'
Choices = Annotated[list[str], Meta(min_length=1, max_length=_MAX_CHOICES)]


class JsonSchema(msgspec.Struct, frozen=True, omit_defaults=True):
    """A schema with the names that OpenAI gives it, which have no effect."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's object for all constraints, of which it has one."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


class Constraint(msgspec.Struct, frozen=True):
    """A grammar, and the field of the body that it comes from.

    `places` has the fields of schemas by their lines in a grammar that is not the client's; 0 is
    the field of the only schema.
    """

    field: str
    grammar: Grammar
    has_rules: bool = False  # of the client's own, which cannot be a part of other ones
    places: dict[int, str] = {}
    unkept: list[str] = []  # fields that no grammar can keep, left out

    def field_of(self, line: str | None, path: str) -> str:
        """Return the field at `path` in the schema of a line. None: there is one schema."""
        place = self.places.get(int(line or 0))
        if place is not None:
            return place + path.removeprefix(WHOLE)
        return self.field if line else self.field + path


class ConstraintFields(SamplingFields, frozen=True, kw_only=True):
    """The fields of chat and completions that constrain the answer. One of them at a time."""

    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Choices | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def origins(self) -> Origins:
        """The paths of the parts in the body of the client."""
        return OF_CHAT

    def constraint(self) -> Constraint | None:
        """Return the constraint, if there is one. Raises InvalidRequestError naming the field."""
        found: list[tuple[str, Grammar]] = []
        if self.response_format is not None:
            found += _response_format(self.response_format, self.origins)
        if self.guided_json is not None:
            found.append(("guided_json", _schema(self.guided_json, "guided_json")))
        if self.guided_regex is not None:
            found.append(("guided_regex", Grammar("regex", self.guided_regex)))
        if self.guided_grammar is not None:
            found.append(("guided_grammar", _grammar(self.guided_grammar)))
        if self.guided_choice is not None:
            found.append(("guided_choice", _choice(self.guided_choice)))
        if self.structured_outputs is not None:
            found += _structured_outputs(self.structured_outputs)
        if len(found) > 1:
            raise excluding(found[0][0], found[1][0])
        if not found:
            return None
        field, grammar = found[0]
        if grammar.kind != "json_schema":
            return Constraint(field, grammar, _has_rules(found[0]))
        return self._of_schema(field, grammar)

    def _of_schema(self, field: str, grammar: Grammar) -> Constraint:
        """Return the constraint of a JSON schema. One that is strict is kept whole, or refused."""
        form = self.response_format
        is_form = form is not None and field == self.origins.format
        place = self.origins.schema if is_form else field
        is_strict = is_form and form and form.json_schema and form.json_schema.strict
        if is_strict or '"uniqueItems"' not in grammar.source:
            return Constraint(field, grammar, places={0: place})
        try:
            schema, paths = without("uniqueItems", json.loads(grammar.source))
        except RecursionError:
            raise invalid_field(place, "is nested too deeply") from None
        grammar = Grammar("json_schema", json.dumps(schema, ensure_ascii=False))
        unkept = [place + text_of(path) for path in paths]
        return Constraint(field, grammar, places={0: place}, unkept=unkept)


def _has_rules(found: tuple[str, Grammar]) -> bool:
    field, grammar = found
    return grammar.kind not in ("json_schema", "regex") and not field.endswith("choice")


def excluding(first: str, second: str) -> InvalidRequestError:
    """Return the error of two fields that constrain one answer."""
    return InvalidRequestError(
        f"`{first}` and `{second}` both constrain the answer; give one of them", param=second
    )


def _response_format(format: ResponseFormat, origins: Origins) -> list[tuple[str, Grammar]]:
    match format.type:
        case "text":
            return []
        case "json_object":
            return [(origins.format, Grammar("json_schema", _ANY_OBJECT))]
        case "json_schema":
            schema = format.json_schema
            if schema is None or schema.schema is None:
                field = origins.schema if schema else "response_format.json_schema"
                raise invalid_field(field, "is required")
            source = json.dumps(schema.schema, ensure_ascii=False)
            return [(origins.format, Grammar("json_schema", source))]
        case "structural_tag":
            tag = msgspec.to_builtins(format)
            return [(origins.format, Grammar("structural_tag", json.dumps(tag)))]


def _structured_outputs(given: StructuredOutputs) -> list[tuple[str, Grammar]]:
    name = "structured_outputs"
    found: list[tuple[str, Grammar]] = []
    if given.json is not None:
        found.append((f"{name}.json", _schema(given.json, f"{name}.json")))
    if given.regex is not None:
        found.append((f"{name}.regex", Grammar("regex", given.regex)))
    if given.choice is not None:
        found.append((f"{name}.choice", _choice(given.choice)))
    if given.grammar is not None:
        found.append((f"{name}.grammar", _grammar(given.grammar)))
    if given.json_object:
        found.append((f"{name}.json_object", Grammar("json_schema", _ANY_OBJECT)))
    if given.structural_tag is not None:
        found.append((f"{name}.structural_tag", Grammar("structural_tag", given.structural_tag)))
    if not found and given.json_object is None:
        raise invalid_field(name, "has no constraint")
    return found


def _schema(value: dict[str, Any] | str, field: str) -> Grammar:
    """Return the grammar of a JSON schema, which may be given as text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise invalid_field(field, f"is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise invalid_field(field, f"is {short(str(value))}, which is no JSON schema")
    return Grammar("json_schema", json.dumps(value, ensure_ascii=False))


def _grammar(source: str) -> Grammar:
    """Return a grammar in Lark's syntax, or in GBNF, whose rules have `::=`."""
    return Grammar("gbnf" if "::=" in source else "lark", source)


def _choice(choices: list[str]) -> Grammar:
    return Grammar("lark", "start: " + " | ".join(map(quoted, choices)))


def quoted(text: str) -> str:
    """Return a fixed text as Lark has it."""
    return json.dumps(text, ensure_ascii=False)
