"""Random calls by the grammars of strict functions: their arguments follow the schemas."""

import json
from typing import Any

import jsonschema
import pydantic
import pytest
from llguidance import LLTokenizer

from tandem.frontend.chat.tools import Function
from tandem.frontend.generation.call_grammar import AnswerGrammar
from tandem.frontend.parsers.formats import TOOL_FORMATS
from tandem.frontend.parsers.output_format import OutputFormat
from tandem.frontend.parsers.pieces import ToolCallDelta
from tandem.frontend.parsers.streaming import StreamingParser
from tandem.grammar.source import tried_source
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.messages import Grammar
from tests.grammar.test_schemas import ALL_FORMATS, FIELD_TYPES, NOT_KEPT, draw, tokenizer

__all__ = ["tokenizer"]  # a fixture
BARE = ("qwen3_coder", "glm45")  # arguments that are strings have no quotes
ENDS = ("\n</parameter>\n", "</arg_value>\n", '"', "}", "]")
FIELD = {"f": "tools[0].function.parameters"}
CASES: dict[str, Any] = {
    **{name: pydantic.create_model("M", p=(kind, ...)) for name, kind in FIELD_TYPES.items()},
    "format": {"properties": {f: {"type": "string", "format": f} for f in ALL_FORMATS[11:15]}},
    "lengths": {"properties": {"p": {"type": "string", "minLength": 3, "maxLength": 9}}},
    "long": {"properties": {"p": {"type": "string", "minLength": 20}}},
    "parts": {"properties": {"p": {"type": "string", "pattern": "a/?b", "maxLength": 30}}},
    "referred": {"$ref": "#/$defs/A", "$defs": {"A": {
        "properties": {"p": {"type": "string"}}, "required": ["p"]}}},
    "unnamed": {"required": ["p"]},
}  # fmt: skip

# tests/grammar has all of them in JSON
IN_JSON = ("str", "set", "recursive", "union", "parts", "referred", "unnamed")


def call_grammar(format: str, schema: Any, *, strict: bool = True) -> tuple[AnswerGrammar, Grammar]:
    """Return the grammar of a call, and its rules."""
    grammar = AnswerGrammar({}, FIELD)
    function = Function(name="f", parameters=schema, strict=strict)
    answer = grammar.calls(TOOL_FORMATS[format], [function], one=True)
    return grammar, grammar.source(answer, None, is_open=False)


def arguments(format: str, text: str, schema: Any) -> Any:
    parser = StreamingParser(OutputFormat(None, TOOL_FORMATS[format]), schemas={"f": schema})
    pieces = parser.push(text) + parser.finish()
    assert all(isinstance(piece, ToolCallDelta) for piece in pieces), text
    return json.loads("".join(getattr(piece, "arguments", "") for piece in pieces))


@pytest.mark.parametrize(
    ("format", "name"),
    [(format, name) for format in BARE for name in CASES] + [("hermes", name) for name in IN_JSON],
)
def test_drawn_arguments_follow_their_schema_or_it_is_refused_by_its_path(
    tokenizer: LLTokenizer, format: str, name: str
) -> None:
    case = CASES[name]
    schema = case if isinstance(case, dict) else case.model_json_schema()
    grammar, rules = call_grammar(format, schema)
    if name in NOT_KEPT:
        with pytest.raises(InvalidRequestError) as caught:
            tried_source(rules, tokenizer)
        line, _, path = str(caught.value.param).removeprefix("grammar[").partition("]")
        found = grammar.places[int(line)] + path
        assert found == f"{FIELD['f']}.properties.p.{NOT_KEPT[name]}"
        return
    source = tried_source(rules, tokenizer)
    texts = [draw(source, tokenizer, seed, ENDS) for seed in range(2)]
    for text in filter(None, texts):
        jsonschema.Draft202012Validator(schema).validate(arguments(format, text, schema))


UNKEPT = [
    ({"properties": {"p": {"type": "string", "pattern": "^a|b$"}}}, ".properties.p.pattern"),
    ({"properties": {"p": {"type": "string", "pattern": "(?=a)b"}}}, ".properties.p.pattern"),
    ({"properties": {"p": {"anyOf": [{"type": "string", "minLength": 2}, {"type": "null"}]}}},
     ".properties.p.anyOf[0].minLength"),
    ({"properties": {"p": {"$ref": "#/$defs/s"}}, "$defs": {"s": {"maxLength": 2}}},
     ".$defs.s.maxLength"),
    ({"properties": {"p": {}}, "minProperties": 2}, ".minProperties"),
    ({"properties": {"p": {}}, "anyOf": [{"required": ["p"]}, {}]}, ".anyOf"),
]  # fmt: skip


@pytest.mark.parametrize("format", BARE)
@pytest.mark.parametrize(("schema", "path"), UNKEPT, ids=[path for _, path in UNKEPT])
def test_bare_arguments_that_cannot_keep_a_keyword_are_refused_by_it_only_if_strict(
    tokenizer: LLTokenizer, format: str, schema: Any, path: str
) -> None:
    with pytest.raises(InvalidRequestError, match="without quotes") as caught:
        call_grammar(format, schema)
    assert caught.value.param == FIELD["f"] + path
    grammar, _ = call_grammar(format, schema, strict=False)
    assert grammar.unkept == [FIELD["f"] + path]
