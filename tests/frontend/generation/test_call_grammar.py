"""The grammars of tool calls, by the library that the workers follow them with."""

import pytest
from llguidance import LLMatcher, LLTokenizer

from tandem.frontend.chat.tools import Function
from tandem.frontend.generation.call_grammar import AnswerGrammar
from tandem.frontend.parsers.formats import REASONING_FORMATS, TOOL_FORMATS, ToolFormat
from tandem.frontend.parsers.output_format import OutputFormat
from tandem.frontend.parsers.pieces import ToolCallDelta
from tandem.frontend.parsers.streaming import StreamingParser
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.messages import Grammar

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["c", "f"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTIONS = [Function(name="weather", parameters=SCHEMA), Function(name="now")]
ARGUMENTS = {
    "function_xml": "<parameter=city>\nPa\nris\n</parameter>\n<parameter=days>\n3\n</parameter>\n",
    "arg_key_xml": "<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n",
    None: '{"city": "Paris", "days": 3}',
}
SPECIAL = 256  # the only special token of the tokenizer of bytes
FORMATS = [name for name, format in TOOL_FORMATS.items() if format.call[0]]
THINK = REASONING_FORMATS["think"]


def follows(grammar: Grammar, text: str) -> bool:
    """True if a text, in tokens of a byte each, is a whole answer by the grammar."""
    return follows_tokens(grammar, list(text.encode()))


def follows_tokens(grammar: Grammar, tokens: list[int]) -> bool:
    assert grammar.kind == "lark"
    tokenizer = LLTokenizer("byte")
    source = LLMatcher.grammar_from_lark(grammar.source)
    assert LLMatcher.validate_grammar(source, tokenizer) == ""
    matcher = LLMatcher(tokenizer, source)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def call(format: ToolFormat, arguments: str, name: str = "weather") -> str:
    before, after = format.call
    first, _, last = format.section
    before = before.replace("%s", name).replace("%d", "0")
    return first + before + arguments + after + last


@pytest.mark.parametrize("name", FORMATS)
def test_required_calls_are_calls_by_their_schema_which_the_parser_reads(name: str) -> None:
    format = TOOL_FORMATS[name]
    grammar = AnswerGrammar({})
    source = grammar.source(grammar.calls(format, FUNCTIONS, one=True), THINK, is_open=False)
    good = ARGUMENTS[format.syntax]
    text = call(format, good)
    assert follows(source, text) and follows(source, f"<think>Hm.</think>\n{text}")
    assert not follows(source, call(format, good.replace("3", "x")))
    assert not follows(source, call(format, good, "other"))
    assert not follows(source, "Just text.") and not follows(source, text + text)
    parser = StreamingParser(
        OutputFormat(THINK, format), schemas={"weather": SCHEMA} if format.syntax else None
    )
    pieces = parser.push(text) + parser.finish()
    assert pieces and all(isinstance(piece, ToolCallDelta) for piece in pieces)


@pytest.mark.parametrize("name", FORMATS)
def test_a_strict_tool_is_held_to_its_schema_where_its_call_begins(name: str) -> None:
    format = TOOL_FORMATS[name]
    grammar = AnswerGrammar({})
    answer = grammar.text_and_calls(format, FUNCTIONS, None, one=False)
    source = grammar.source(answer, None, is_open=False)
    begin = "" if format.bare_begin else "I look.\n"
    good = ARGUMENTS[format.syntax]
    assert follows(source, begin + call(format, good)) and follows(source, "Just text.")
    assert not follows(source, begin + call(format, good.replace("3", "x")))


@pytest.mark.parametrize("name", FORMATS)
def test_a_tool_that_is_not_strict_may_have_any_arguments_beside_one_that_is(name: str) -> None:
    format = TOOL_FORMATS[name]
    grammar = AnswerGrammar({})
    grammar.free = {"weather"}
    answer = grammar.text_and_calls(format, FUNCTIONS, None, one=True)
    source = grammar.source(answer, None, is_open=False)
    changed = ARGUMENTS[format.syntax].replace("city", "town")
    assert follows(source, call(format, changed))
    assert not follows(source, call(format, changed, "other"))


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_arguments_that_may_be_any_end_at_a_special_token(name: str) -> None:
    format, end = TOOL_FORMATS[name], "</tool_call>"
    grammar = AnswerGrammar({end: SPECIAL})
    grammar.free = {"weather"}
    source = grammar.source(grammar.calls(format, FUNCTIONS, one=True), None, is_open=False)
    changed = call(format, ARGUMENTS[format.syntax].replace("city", "town"))
    tokens = list(changed.removesuffix(end).encode())
    assert follows_tokens(source, [*tokens, SPECIAL])
    assert not follows_tokens(source, [*tokens, *end.encode()])


def test_a_parameter_may_have_the_mark_of_numbers_in_its_name() -> None:
    schema = {"properties": {"a%d": {"type": "integer"}}, "required": ["a%d"]}
    grammar, format = AnswerGrammar({}), TOOL_FORMATS["glm45"]
    answer = grammar.calls(format, [Function(name="f", parameters=schema)], one=True)
    source = grammar.source(answer, None, is_open=False)
    arguments = "<arg_key>a%d</arg_key>\n<arg_value>3</arg_value>\n"
    assert follows(source, call(format, arguments, "f"))
    assert not follows(source, call(format, arguments.replace("%d", "5"), "f"))


@pytest.mark.parametrize(
    ("regex", "text"), [("a\\\nb", "a\nb"), ("a\nb", "a\nb"), (r"[/]\/\\", "//\\")]
)
def test_a_regex_may_have_slashes_and_line_breaks(regex: str, text: str) -> None:
    grammar = AnswerGrammar({})
    source = grammar.source(grammar.body(Grammar("regex", regex), None), None, is_open=False)
    assert follows(source, text) and not follows(source, text + text)


def test_reasoning_that_the_prompt_opened_comes_before_the_constraint() -> None:
    for kind, rule in (
        ("json_schema", '{"type": "integer"}'),
        ("regex", "[1-9]/?"),
        ("lark", '"1"'),
    ):
        grammar = AnswerGrammar({})
        body = grammar.body(Grammar(kind, rule), THINK)  # type: ignore[arg-type]
        source = grammar.source(body, THINK, is_open=True)
        assert follows(source, "So 2.</think>\n\n1")
        assert not follows(source, "1") and not follows(source, "So 2.</think>\n\nx")


def test_special_tokens_stand_in_a_grammar_by_their_ids() -> None:
    grammar = AnswerGrammar({"<|channel|>": 7, "<|message|>": 8, "<|end|>": 9})
    harmony = REASONING_FORMATS["harmony"]
    answer = grammar.text_and_calls(TOOL_FORMATS["harmony"], FUNCTIONS, harmony, one=False)
    source = grammar.source(answer, harmony, is_open=False).source
    assert '<[7]> "commentary to=functions.weather <|constrain|>json" <[8]>' in source
    assert '<[7]> "final" <[8]> TEXT' in source and "<|channel|>" not in source


def test_a_schema_that_is_none_is_an_error_of_the_caller() -> None:
    for schema in ({"properties": [1]}, {"properties": {"a": {}}, "required": 5}):
        function = Function(name="f", parameters=schema)
        with pytest.raises(InvalidRequestError, match="tools"):
            AnswerGrammar({}).calls(TOOL_FORMATS["glm45"], [function], one=True)
    strange = Function(name="f", parameters={"properties": {"a": {"type": "string", "enum": 5}}})
    assert AnswerGrammar({}).calls(TOOL_FORMATS["glm45"], [strange], one=True)
