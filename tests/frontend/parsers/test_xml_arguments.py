"""Arguments that are written as bare text: their types, their ends, and their way to the client."""

import json
from itertools import cycle, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.frontend.chat.tools import Function
from tandem.frontend.generation.call_grammar import AnswerGrammar
from tandem.frontend.parsers.argument_types import ArgumentTypes
from tandem.frontend.parsers.formats import TOOL_FORMATS
from tandem.frontend.parsers.output_format import output_format
from tandem.frontend.parsers.pieces import Content, ToolCallDelta
from tandem.frontend.parsers.streaming import StreamingParser
from tandem.frontend.parsers.xml_calls import MAX_KEY_CHARS
from tests.frontend.generation.test_call_grammar import follows
from tests.frontend.parsers.test_streaming import joined

FORMATS = ("qwen3_coder", "glm45")
STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
DEFINITIONS = {
    "Zip": STRING,
    "Count": INTEGER,
    "Alias": {"$ref": "#/$defs/Zip"},
    "a/b": STRING,
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, INTEGER]},
}
# schema, text, the value that it stands for
TYPES: list[tuple[dict[str, Any], str, object]] = [
    (STRING, "12345", "12345"),
    (STRING, "null", "null"),
    ({"anyOf": [STRING, NULL]}, "12345", "12345"),
    ({"anyOf": [STRING, NULL]}, "true", "true"),
    ({"anyOf": [STRING, NULL]}, "null", None),
    ({"anyOf": [STRING, NULL]}, "nullable", "nullable"),
    ({"oneOf": [STRING, INTEGER]}, "12345", "12345"),
    ({"type": ["string", "null"]}, "1.5", "1.5"),
    ({"type": ["integer", "null"]}, "7", 7),
    ({"type": ["integer", "null"]}, "None", None),
    ({"$ref": "#/$defs/Zip"}, "12345", "12345"),
    ({"$ref": "#/$defs/Alias"}, "12345", "12345"),
    ({"$ref": "#/$defs/a~1b"}, "null", "null"),
    ({"$ref": "#/$defs/Count"}, "5", 5),
    ({"$ref": "#/$defs/Loop"}, "5", 5),
    ({"allOf": [{"$ref": "#/$defs/Zip"}, {"minLength": 2}]}, "12345", "12345"),
    ({"allOf": [{"type": ["string", "integer"]}, INTEGER]}, "12", 12),
    ({"const": "12"}, "12", "12"),
    ({"const": 12}, "12", 12),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, "auto", None]}, "1", 1),
    ({"enum": [1, "auto", None]}, "auto", "auto"),
    ({"enum": [1, "auto", None]}, "null", None),
    ({"anyOf": [{"enum": ["auto"]}, INTEGER]}, "3", 3),
    ({"anyOf": [{"enum": ["auto"]}, INTEGER]}, "auto", "auto"),
    (INTEGER, "140.0", 140),
    (INTEGER, "140", 140),
    ({"type": "number"}, "140.0", 140.0),
    ({"type": "number"}, "3", 3),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "false", False),
    (NULL, "None", None),
    ({"type": "object"}, "{'a': [True, None, \"x\"]}", {"a": [True, None, "x"]}),
    ({"type": "object"}, '{"a": "</b>"}', {"a": "</b>"}),
    ({"type": "array", "items": STRING}, '["1", "2"]', ["1", "2"]),
    ({"type": "array"}, "(1, 2)", [1, 2]),
    ({}, "42", 42),
    ({}, "Paris", "Paris"),
    ({}, '"Paris"', "Paris"),
    (INTEGER, "a few", "a few"),
    ({"type": "number"}, "NaN", "NaN"),
]


def schema_of(argument: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"x": argument},
        "required": ["x"] if required else [],
        "$defs": DEFINITIONS,
    }


def written(format: str, value: str, name: str = "x") -> str:
    if format == "glm45":
        argument = f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n"
        return f"<tool_call>f\n{argument}</tool_call>"
    argument = f"<parameter={name}>\n{value}\n</parameter>\n"
    return f"<tool_call>\n<function=f>\n{argument}</function>\n</tool_call>"


def read(format: str, text: str, schema: dict[str, Any]) -> Any:
    parser = StreamingParser(output_format("none", format), schemas={"f": schema})
    content, _, calls = joined(parser.push(text) + parser.finish())
    assert not content and not parser.is_in_call
    [(name, arguments)] = calls
    assert name == "f"
    return json.loads(arguments)


@pytest.mark.parametrize(("argument", "text", "value"), TYPES)
def test_an_argument_has_the_type_that_its_schema_allows(
    argument: dict[str, Any], text: str, value: object
) -> None:
    for format in FORMATS:
        found = read(format, written(format, text), schema_of(argument))["x"]
        assert found == value and type(found) is type(value)


@pytest.mark.parametrize(("case", "format"), list(zip(TYPES, cycle(FORMATS), strict=False)))
def test_an_argument_that_a_grammar_allows_is_of_its_type(
    case: tuple[dict[str, Any], str, object], format: str
) -> None:
    """The grammar takes JSON only where the parser may also read Python."""
    argument, text, value = case
    if "Loop" in json.dumps(argument):
        return  # a reference to itself is no grammar
    if not ArgumentTypes(schema_of(argument)).of("x").is_text:
        text = value if isinstance(value, str) and "enum" in argument else json.dumps(value)
        text = value if "const" in argument and isinstance(value, str) else text
    grammar = AnswerGrammar({})
    function = Function(name="f", parameters=schema_of(argument))
    rules = grammar.calls(TOOL_FORMATS[format], [function], one=True)
    if follows(grammar.source(rules, None, is_open=False), written(format, text)):
        assert read(format, written(format, text), schema_of(argument)) == {"x": value}
    else:
        assert value in ("a few", "NaN")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/Args", "$defs": {"Args": {"properties": {"x": STRING}}}},
        {"allOf": [{"properties": {"x": STRING}}, {"required": ["x"]}]},
        {"anyOf": [{"properties": {"x": STRING}}, {"properties": {"y": INTEGER}}]},
        {"additionalProperties": STRING},
        {"properties": {"y": INTEGER}},
        {"properties": 5, "allOf": "x", "$ref": 7},
        {"$ref": "#"},
        {},
    ],
)
def test_an_argument_is_found_wherever_a_schema_names_it(
    format: str, schema: dict[str, Any]
) -> None:
    assert read(format, written(format, "5"), schema) == {"x": "5"}


def test_a_schema_whose_references_multiply_is_read_once() -> None:
    definitions: dict[str, Any] = {
        f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 9} for n in range(30)
    }
    schema = {
        "properties": {"x": {"$ref": "#/$defs/d0"}},
        "$defs": definitions | {"d30": {"enum": [5, 6]}},
    }
    assert ArgumentTypes(schema).of("x").takes(5)
    assert not ArgumentTypes(schema).of("x").takes("5")


ARGUMENTS: list[dict[str, Any]] = [STRING, {"anyOf": [STRING, NULL]}, {}, INTEGER]
TAGS = ["</parameter>", "</function>", "</tool_call>", "<parameter=", "</arg_value>", "<arg_key>",
        "<tool_call>", "\n", " ", "x", "é", '"', "\\", "<", "</"]  # fmt: skip
LOOKS_ALIKE = [
    'print("</function>")', "</parameter>", "a\n</parameter>\nb", "</tool_call>", "</arg_value>",
    "<arg_value>x</arg_value>", "\n</parameter>\n</function>\n", "</function>\n</tool", "<b>\n\n",
    "<parameter=y>", "\n\nx\n\n",
]  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("argument", ARGUMENTS[:3])
def test_tags_in_an_argument_are_part_of_it(format: str, argument: dict[str, Any]) -> None:
    schema = schema_of(argument)
    for value in LOOKS_ALIKE:
        text = written(format, value)
        assert read(format, text, schema) == {"x": value}
        for size in (1, 3):
            parser = StreamingParser(output_format("none", format), schemas={"f": schema})
            parts = [text[start : start + size] for start in range(0, len(text), size)]
            pieces = [piece for part in parts for piece in parser.push(part)]
            assert json.loads(joined(pieces + parser.finish())[2][0][1]) == {"x": value}


@given(st.sampled_from(FORMATS), st.lists(st.sampled_from(TAGS), max_size=8).map("".join))
def test_any_text_of_an_argument_is_read_up_to_an_end_of_the_call(format: str, value: str) -> None:
    text = f"{written(format, value)}after"
    parser = StreamingParser(output_format("none", format), schemas={"f": schema_of(STRING)})
    content, _, calls = joined(parser.push(text) + parser.finish())
    read_value = json.loads(calls[0][1])["x"]
    assert read_value == value or value.startswith(read_value) or parser.is_in_call
    if not any(tag in value for tag in ("</parameter>", "</function>", "</arg_value>")):
        assert read_value == value and content == "after"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [1_000, 100_000])
def test_a_name_has_a_bound_and_nothing_longer_is_held(format: str, size: int) -> None:
    for length, known in ((MAX_KEY_CHARS, True), (MAX_KEY_CHARS + 1, False), (50_000, False)):
        name = "n" * length
        text = written(format, "v", name)
        parser = StreamingParser(output_format("none", format), schemas={"f": schema_of(STRING)})
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        pieces = [piece for part in parts for piece in parser.push(part)]
        [(_, arguments)] = joined(pieces + parser.finish())[2]
        assert json.loads(arguments) == ({name: "v"} if known else {})


@pytest.mark.parametrize("format", FORMATS)
def test_a_long_argument_goes_out_as_it_is_written(format: str) -> None:
    """An agent that writes a file shows it while it grows."""
    text = written(format, "line < of text\n" * 50)
    parser = StreamingParser(output_format("none", format), schemas={"f": schema_of(STRING)})
    lengths = [0]
    for letter in text:
        for piece in parser.push(letter):
            assert isinstance(piece, ToolCallDelta) and len(piece.arguments) < 30
            lengths.append(lengths[-1] + len(piece.arguments))
    assert len(lengths) > 600 and max(after - before for before, after in pairwise(lengths)) < 30
    assert not parser.finish() and not parser.is_in_call


@pytest.mark.parametrize("format", FORMATS)
def test_a_call_that_an_end_token_cuts_is_still_open(format: str) -> None:
    text = written(format, "Paris")
    end = text.index("ris")
    parser = StreamingParser(output_format("none", format), schemas={"f": schema_of(STRING)})
    pieces = parser.push(text[:end]) + parser.finish()
    assert parser.is_in_call and not any(isinstance(piece, Content) for piece in pieces)
    assert joined(pieces)[2] == [("f", '{"x": "Pa')]


@settings(max_examples=100)
@given(st.data())
def test_a_call_is_read_alike_in_any_split_and_wherever_it_is_cut(data: st.DataObject) -> None:
    format, argument = data.draw(st.sampled_from(FORMATS)), data.draw(st.sampled_from(ARGUMENTS))
    parts = st.lists(st.sampled_from([*TAGS, "null", "<parameter=y>", "5"]), max_size=10)
    text = written(format, data.draw(parts.map("".join))) + data.draw(parts.map("".join))
    text = text[: data.draw(st.integers(0, len(text)))]
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    is_cut = data.draw(st.booleans())

    def answer(ends: list[int]) -> object:
        parser = StreamingParser(output_format("none", format), schemas={"f": schema_of(argument)})
        pieces = []
        for start, end in pairwise([0, *ends, len(text)]):
            pieces += parser.push(text[start:end]) if start < end else []
        return joined(pieces + parser.finish(is_cut=is_cut)), parser.is_in_call

    assert answer(places) == answer([])
