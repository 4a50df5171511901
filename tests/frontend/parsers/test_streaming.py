"""Answers of model families in every split, and texts that are no calls."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.frontend.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from tandem.frontend.parsers.output_format import output_format
from tandem.frontend.parsers.pieces import Content, Piece, Reasoning, ToolCallDelta
from tandem.frontend.parsers.streaming import StreamingParser
from tests.frontend.parsers.cases import CASES, Case
from tests.frontend.parsers.shared_cases import SCHEMAS, SHARED_CASES

ALL_CASES = CASES | SHARED_CASES
Answer = tuple[str, str, list[tuple[str, str]]]
FORMATS = [("none", name) for name in TOOL_FORMATS] + [(name, "none") for name in REASONING_FORMATS]
MARKS = sorted({mark for names in FORMATS for mark in output_format(*names).all_marks})
PARTS = st.sampled_from(
    [*MARKS, '{"name": "f", "arguments": ', '{"a": 1}', "{", "}", "[", "]", '"', "\\", ",", ";",
     "f", " ", "\n", "x < y", "f(a=1)", "call:f{a:1}", "<function=f>", "<parameter=a>", "```",
     "function<｜tool▁sep｜>f\n```json\n", "f<｜tool▁sep｜>", "f:0<|tool_call_argument_begin|>",
     "<arg_key>a</arg_key><arg_value>1</arg_value>", "to=f<|message|>", "é", ""]
)  # fmt: skip
TEXTS = st.lists(PARTS, max_size=12).map("".join)


def test_the_marks_of_a_format_have_those_within_a_call() -> None:
    marks = output_format("none", "mistral").all_marks
    assert {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"} <= marks
    assert TOOL_FORMATS["mistral"].header not in marks


def joined(pieces: list[Piece]) -> Answer:
    """The content, the reasoning, and the calls; indices, ids and names come once, in order."""
    content, reasoning, calls = "", "", list[list[str]]()
    for piece in pieces:
        match piece:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case ToolCallDelta(index, arguments, call_id, name):
                if name:
                    assert call_id and index == len(calls)
                    calls.append([name, ""])
                assert index == len(calls) - 1
                calls[index][1] += arguments
    return content, reasoning, [(name, arguments) for name, arguments in calls]


def parse(case: Case, parts: list[str]) -> Answer:
    parser = StreamingParser(
        output_format(case.reasoning, case.tools),
        starts_reasoning=case.starts_reasoning,
        schemas=SCHEMAS,
    )
    pieces = [piece for part in parts if part for piece in parser.push(part)]
    return joined(pieces + parser.finish())


@pytest.mark.parametrize("name", ALL_CASES)
def test_an_answer_is_read_as_its_model_means_it_in_every_split(name: str) -> None:
    case = ALL_CASES[name]
    whole = parse(case, [case.text])
    content, reasoning, calls = whole
    assert (content, reasoning) == (case.content, case.thoughts)
    assert [(each, json.loads(arguments)) for each, arguments in calls] == case.calls
    for place in range(0, len(case.text), 1 if name in CASES else 3):
        assert parse(case, [case.text[:place], case.text[place:]]) == whole, place
    for size in (1, 2, 3, 7):
        parts = [case.text[start : start + size] for start in range(0, len(case.text), size)]
        assert parse(case, parts) == whole, size


@settings(max_examples=120)
@given(st.data())
def test_any_text_is_read_alike_in_any_split(data: st.DataObject) -> None:
    tools = data.draw(st.sampled_from([*TOOL_FORMATS, "none"]))
    reasoning = data.draw(st.sampled_from([*REASONING_FORMATS, "none"]))
    text = data.draw(TEXTS)
    starts = reasoning != "none" and data.draw(st.booleans())
    case = Case(tools, reasoning, text, starts_reasoning=starts)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert parse(case, parts) == parse(case, [text])


@settings(max_examples=100)
@given(st.sampled_from(sorted(TOOL_FORMATS)), TEXTS)
def test_no_text_is_lost_where_it_makes_no_call(tools: str, text: str) -> None:
    case = Case(tools, "none", text)
    content, _, calls = parse(case, [text])
    for mark in TOOL_FORMATS[tools].dropped:
        text, content = text.replace(mark, ""), content.replace(mark, "")
    if not calls:
        assert "".join(content.split()) == "".join(text.split())


def test_the_arguments_of_a_call_come_as_they_grow() -> None:
    parser = StreamingParser(output_format("none", "hermes"))
    assert parser.push('<tool_call>{"name": "f", "argu') == []
    [first, second] = parser.push('ments": {"a": "b')
    assert isinstance(first, ToolCallDelta) and first.name == "f" and first.id
    assert second == ToolCallDelta(0, '{"a": "b')
    assert parser.push('c"}') == [ToolCallDelta(0, 'c"}')]
    assert parser.push("}</tool_call>") == [] and parser.finish() == []


def test_a_list_that_begins_an_answer_is_held_no_longer_than_it_lasts() -> None:
    parser = StreamingParser(output_format("none", "llama_pythonic"))
    assert parser.push("[1, ") == []
    assert joined(parser.push("2] is")) == ("[1, 2] is", "", [])
    parser = StreamingParser(output_format("none", "llama_pythonic"))
    assert joined(parser.push("[f(a=1)] It")) == ("It", "", [("f", '{"a": 1}')])


def test_ids_are_as_long_as_templates_want_them() -> None:
    [call, *_] = StreamingParser(output_format("none", "mistral")).push("[TOOL_CALLS]f{}")
    assert isinstance(call, ToolCallDelta) and len(call.id) == 9


RUNS = {name: [" ", "f", '{"name": "f" ', '{"name": "f', "f ", "[ "] for name in TOOL_FORMATS}
RUNS["harmony"].append("f<|channel|> ")
RUNS["qwen3_coder"] += [
    "<function=f><parameter=f",
    "<function=f><parameter=x>v</parameter> ",
    "<function=f><parameter=x>v</parameter></function> ",
]
RUNS["glm45"] += [
    "f<arg_key>f",
    "f<arg_key>a</arg_key> ",
    "f<arg_key>a</arg_key><arg_value>v</arg_value> ",
]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_long_run_after_a_mark_is_read_in_time(name: str) -> None:
    for run in RUNS[name]:
        parser = StreamingParser(output_format("none", name))
        pieces = parser.push(next(iter(TOOL_FORMATS[name].begins)))
        started_s = time.process_time()
        pieces += parser.push(run)
        for _ in range(3000):
            pieces += parser.push(run[-1] * 20)
        pieces += parser.finish()
        took_s = time.process_time() - started_s
        assert took_s < 1.0, run  # 10 ms; seconds where each push reads all again
        assert not [piece for piece in pieces if isinstance(piece, Reasoning)]
