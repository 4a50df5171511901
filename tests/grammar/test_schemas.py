"""JSON schemas as clients have them: followed, or refused by the path of their fault."""

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import random
import re
import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import jsonschema
import numpy as np
import pydantic
import pytest
from llguidance import LLMatcher, LLTokenizer

from tandem.grammar.compiled import LIMITS, load_tokenizer
from tandem.grammar.schemas import FORMATS
from tandem.grammar.source import tried_source
from tandem.models.paths import BUNDLED_MODEL
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.messages import Grammar
from tests.grammar.conftest import EOS, VOCAB_SIZE

MAX_TOKENS = 300
# Of JSON Schema, OpenAPI, Pydantic and MCP servers.
ALL_FORMATS = [
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname",
    "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template",
    "json-pointer", "relative-json-pointer", "regex", "int32", "int64", "float", "double",
    "decimal", "byte", "binary", "password", "base64url", "base64", "path", "file-path",
    "directory-path", "json-string", "multi-host-uri", "ipv4network", "ipv6network",
    "ipvanyaddress", "ipv4interface", "time-delta", "color", "phone", "url", "html", "markdown",
    "unknown", "credit-card",
]  # fmt: skip


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Inner(pydantic.BaseModel):
    """A model in a model."""

    name: str = "x"
    value: int | None = None


class Tree(pydantic.BaseModel):
    """A model that has itself in it."""

    label: Literal["a", "b"]
    children: "list[Tree]" = []


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: str


FIELD_TYPES: dict[str, Any] = {
    "str": str, "int": int, "float": float, "bool": bool, "None": None, "Any": Any,
    "Decimal": decimal.Decimal, "datetime": datetime.datetime, "date": datetime.date,
    "time": datetime.time, "timedelta": datetime.timedelta, "UUID": uuid.UUID,
    "Path": pathlib.Path, "bytes": bytes, "SecretStr": pydantic.SecretStr,
    "Base64Bytes": pydantic.Base64Bytes, "AnyUrl": pydantic.AnyUrl,
    "IPv4Address": ipaddress.IPv4Address, "IPv6Address": ipaddress.IPv6Address,
    "Enum": Color, "Literal": Literal["a", 1, None], "Optional": str | None,
    "list": list[int], "set": set[str], "frozenset": frozenset[int], "tuple": tuple[int, str],
    "dict": dict[str, int], "model": Inner, "recursive": Tree,
    "union": Annotated[Cat | Dog, pydantic.Field(discriminator="kind")],
    "constrained": Annotated[str, pydantic.Field(min_length=2, max_length=5, pattern="^[a-z]+$")],
    "Pattern": re.Pattern[str],
}  # fmt: skip
NOT_KEPT = {"set": "uniqueItems", "frozenset": "uniqueItems"}  # where nothing may be left out


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return load_tokenizer(BUNDLED_MODEL / "tokenizer.json", VOCAB_SIZE, (EOS,))


def source_of(schema: Any, tokenizer: LLTokenizer) -> str:
    return tried_source(Grammar("json_schema", json.dumps(schema)), tokenizer)


def draw(
    source: str, tokenizer: LLTokenizer, seed: int, ends: Sequence[str] = ('"', "}", "]")
) -> str | None:
    """Return a random answer; None for one that is cut. `ends` are tried at every other place."""
    rng = random.Random(seed)
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    token_ids: list[int] = []
    while len(token_ids) < MAX_TOKENS:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.nonzero(np.unpackbits(mask, bitorder="little"))[0].tolist()
        assert allowed and not matcher.is_error(), tokenizer.decode_str(token_ids)
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.9):
            return tokenizer.decode_str(token_ids)
        drawn = [rng.choice([each for each in allowed if each != EOS])]
        for end in ends if rng.random() < 0.5 else ():
            end_ids = tokenizer.tokenize_str(end)
            if matcher.validate_tokens(end_ids) == len(end_ids):
                drawn = end_ids
                break
        assert matcher.consume_tokens(drawn)
        token_ids += drawn
    return None


def check_draws(schema: Any, tokenizer: LLTokenizer, num: int = 5) -> None:
    source = source_of(schema, tokenizer)
    drawn = [text for text in (draw(source, tokenizer, seed) for seed in range(num)) if text]
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    for text in drawn:
        validator(schema).validate(json.loads(text))


@pytest.mark.parametrize("format", ALL_FORMATS)
def test_a_string_of_any_format_is_followed(tokenizer: LLTokenizer, format: str) -> None:
    field = {"type": "string", "format": format}
    check_draws({"type": "object", "properties": {"p": field}, "required": ["p"]}, tokenizer, 2)


def test_the_formats_that_are_kept_are_those_of_llguidance(tokenizer: LLTokenizer) -> None:
    assert len(set(ALL_FORMATS)) == 46
    for format in ALL_FORMATS:
        schema = {"type": "string", "format": format}
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema), log_level=0)
        assert matcher.is_error() != (format in FORMATS), format


@pytest.mark.parametrize("name", FIELD_TYPES)
def test_a_usual_field_of_pydantic_is_followed_or_refused_by_its_path(
    tokenizer: LLTokenizer, name: str
) -> None:
    model = pydantic.create_model("Model", p=(FIELD_TYPES[name], ...))
    schema = model.model_json_schema()
    if name in NOT_KEPT:
        with pytest.raises(InvalidRequestError) as caught:
            source_of(schema, tokenizer)
        assert caught.value.param == f"grammar.properties.p.{NOT_KEPT[name]}"
    else:
        check_draws(schema, tokenizer)


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}, "v": {"not": {}}}}
FAULTS: list[tuple[Any, str]] = [
    ({"properties": {"p": {"not": {}}}}, ".properties.p.not"),
    ({"properties": {"p": {"not": {}}, "q": {"if": {}, "contains": {}}}}, ".properties.p.not"),
    ({"anyOf": [{}, {"type": "array", "contains": {"const": 1}}]}, ".anyOf[1].contains"),
    ({"properties": {"a b/c": {"uniqueItems": True}}}, ".properties['a b/c'].uniqueItems"),
    ({"$ref": "#/$defs/Node", "$defs": {"Node": NODE}}, ".$defs.Node.properties.v.not"),
    ({"items": {"type": "strin"}}, ".items.type"),
    ({"properties": {"p": {"type": "string", "pattern": "(?=a)b"}}}, ".properties.p.pattern"),
    ({"properties": {"p": {"$ref": "#/nowhere"}}}, ".properties.p.$ref"),
    ({"properties": {"p": {"$ref": "https://a.example/s"}}}, ".properties.p.$ref"),
    ({"properties": {"p": {"oneOf": [{"minLength": 1}, {"type": "string"}]}}},
     ".properties.p.oneOf"),
    ({"$defs": {"a b": {"propertyNames": {}}}, "items": {"$ref": "#/$defs/a%20b"}},
     ".items.$ref"),
    ({"properties": {"p": {"minLength": -1}}}, ".properties.p.minLength"),
    ({"properties": {"p": {"enum": "a"}}}, ".properties.p.enum"),
    ({"$ref": "#"}, ".$ref"),
    ({"x-guidance": {"lenient": True}, "not": {}}, ".not"),
    ({"properties": {"p": {"x-guidance": {"lenient": True}, "not": {}}}}, ".properties.p.not"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, ".required"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "path"), FAULTS, ids=[path for _, path in FAULTS])
def test_a_schema_that_cannot_be_followed_is_refused_by_the_path_of_its_fault(
    tokenizer: LLTokenizer, schema: Any, path: str
) -> None:
    as_json = json.dumps(schema)
    tag = {"structures": [{"begin": "<a>", "end": "</a>", "schema": schema}], "triggers": ["<a>"]}
    for grammar, place in (
        (Grammar("json_schema", as_json), ""),
        (Grammar("lark", f'start: A b\nA: "a"\nb: %json {{}} %json {as_json}'), "[3]"),
        (Grammar("structural_tag", json.dumps(tag)), ".structures[0].schema"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            tried_source(grammar, tokenizer)
        assert caught.value.param == f"grammar{place}{path}"
        message = caught.value.message
        assert "%json" not in message and "lark" not in message and "NoExt" not in message


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": "object", "properties": {"a/b": {"$ref": "#/$defs/x~1y"}},
         "$defs": {"x/y": {"enum": [1, "2"]}}},
        {"$ref": "#here", "$defs": {"a": {"$anchor": "here", "type": "boolean"}}},
        {"type": ["string", "null"], "format": "path", "nullable": True, "x-order": 1},
        {"properties": {"format": {"type": "string"}, "x-guidance": {"type": "integer"}}},
    ],
)  # fmt: skip
def test_references_annotations_and_names_like_keywords_are_no_fault(
    tokenizer: LLTokenizer, schema: Any
) -> None:
    check_draws(schema, tokenizer)


NAMED = {"score": {"type": "integer"}, "rank": {"type": "integer"}}


def pattern_schemas() -> Iterator[Any]:
    for pattern in ("^s", "^score$", "score|rank", "^(score|rank)$", "^(score|other)$", "e/?$"):
        for required, additional in (([], True), (["score"], False)):
            yield {
                "type": "object",
                "properties": NAMED,
                "patternProperties": {pattern: {"minimum": 3}},
                "required": required,
                "additionalProperties": additional,
            }


@pytest.mark.parametrize("schema", list(pattern_schemas()), ids=str)
def test_a_pattern_over_the_name_of_a_property_is_followed(
    tokenizer: LLTokenizer, schema: Any
) -> None:
    check_draws(schema, tokenizer, 8)
