"""Situations that the tests of vLLM's and SGLang's parsers have, for eight families of models.

Both projects test each family with the same few situations, and with answers that once went wrong.
The facts are theirs, the texts are not.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.frontend.parsers.cases import SCHEMAS as WEATHER_SCHEMAS
from tests.frontend.parsers.cases import V3_BEGIN, V3_END, Case

Call = tuple[str, dict[str, Any]]

TYPES = {
    "text": "hello", "whole": 42, "real": 3.5, "yes": True, "none": None,
    "items": ["a", "b"], "inner": {"key": "value"}, "no_items": [], "no_keys": {},
}  # fmt: skip
ESCAPES = {"quoted": 'He said "hello"', "path": "C:\\Users\\file", "lines": "one\ntwo", "é": "🎉"}
BRACKETS = {"text": "[City] - {Sky} - [TOOL_CALLS", "deep": {"a": {"b": {"c": {"d": [[1], [2]]}}}}}
TEXT = {"type": "string"}
SCHEMAS = WEATHER_SCHEMAS | {
    "types": {"properties": {key: TEXT if key == "text" else {} for key in TYPES}},
    "escapes": {"properties": dict.fromkeys(ESCAPES, TEXT)},
    "brackets": {"properties": {"text": TEXT, "deep": {}}},
}


class Family(NamedTuple):
    """The syntax of a model family."""

    tools: str
    write: Callable[[list[Call]], str]
    keeps_calls_apart: bool = False  # text between two calls is possible
    takes_text_before: bool = True


def _hermes(calls: list[Call]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )


def _xml_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _qwen3_coder(calls: list[Call]) -> str:
    parts = []
    for name, arguments in calls:
        lines = [
            f"<parameter={key}>\n{_xml_value(value)}\n</parameter>"
            for key, value in arguments.items()
        ]
        inner = "\n".join([f"<function={name}>", *lines, "</function>"])
        parts.append(f"<tool_call>\n{inner}\n</tool_call>")
    return "\n".join(parts)


def _glm(calls: list[Call]) -> str:
    parts = []
    for name, arguments in calls:
        lines = [
            f"<arg_key>{key}</arg_key>\n<arg_value>{_xml_value(value)}</arg_value>"
            for key, value in arguments.items()
        ]
        parts.append("\n".join([f"<tool_call>{name}", *lines, "</tool_call>"]))
    return "\n".join(parts)


def _llama(calls: list[Call]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": each}) for name, each in calls)


def _pythonic(calls: list[Call]) -> str:
    parts = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"[{', '.join(parts)}]"


def _mistral(calls: list[Call]) -> str:
    listed = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return f"[TOOL_CALLS] {json.dumps(listed)}"


def _deepseek(calls: list[Call]) -> str:
    parts = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return V3_BEGIN + "\n".join(parts) + V3_END


def _kimi(calls: list[Call]) -> str:
    parts = (
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{json.dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls, 5)  # counted over a conversation
    )
    return f"<|tool_calls_section_begin|>{''.join(parts)}<|tool_calls_section_end|>"


FAMILIES = {
    "hermes": Family("hermes", _hermes, keeps_calls_apart=True),
    "qwen3-coder": Family("qwen3_coder", _qwen3_coder, keeps_calls_apart=True),
    "glm": Family("glm45", _glm, keeps_calls_apart=True),
    "llama": Family("llama3_json", _llama, takes_text_before=False),
    "pythonic": Family("llama_pythonic", _pythonic, takes_text_before=False),
    "mistral": Family("mistral", _mistral),
    "deepseek": Family("deepseek_v3", _deepseek, keeps_calls_apart=True),
    "kimi": Family("kimi_k2", _kimi, keeps_calls_apart=True),
}


def _of_family(name: str, family: Family) -> dict[str, Case]:
    """The situations that every family has."""

    def case(text: str, content: str = "", calls: list[Call] | None = None) -> Case:
        return Case(family.tools, "none", text, content, calls=calls or [])

    one: list[Call] = [("get_weather", {"city": "Lima"})]
    two: list[Call] = [*one, ("get_time", {"zone": "America/Lima"})]
    plain = "Which city is it? I can look the weather up."
    cases = {
        "no call": case(plain, plain),
        "one call": case(family.write(one), calls=one),
        "two calls": case(family.write(two), calls=two),
        "every type": case(family.write([("types", TYPES)]), calls=[("types", TYPES)]),
        "no arguments": case(family.write([("refresh", {})]), calls=[("refresh", {})]),
        "escapes": case(family.write([("escapes", ESCAPES)]), calls=[("escapes", ESCAPES)]),
        "brackets": case(family.write([("brackets", BRACKETS)]), calls=[("brackets", BRACKETS)]),
        "text after": case(f"{family.write(one)}\nIs that all?", "Is that all?", one),
    }
    if family.takes_text_before:
        cases["text before"] = case(f"I look it up. {family.write(one)}", "I look it up. ", one)
    if family.keeps_calls_apart:
        text = f"First.{family.write(two[:1])}Then.{family.write(two[1:])}"
        cases["text between"] = case(text, "First.Then.", two)
    return {f"{name}: {situation}": each for situation, each in cases.items()}


CITY: Call = ("get_weather", {"city": "Lima"})
KIMI_ARGUMENTS = '<|tool_call_argument_begin|>{"city": "Lima"}<|tool_call_end|>'


def _case(tools: str, text: str, content: str, *calls: Call) -> Case:
    return Case(tools, "none", text, content, calls=list(calls))


SHARED_CASES = {
    name: case for family in FAMILIES for name, case in _of_family(family, FAMILIES[family]).items()
} | {
    "hermes: up to the end of text": _case(
        "hermes", _hermes([CITY]).removesuffix("\n</tool_call>"), "", CITY
    ),
    "hermes: without a line break": _case("hermes", _hermes([CITY]).replace("\n", ""), "", CITY),
    "hermes: parts on lines of their own": _case(
        "hermes",
        '<tool_call>\\n{"name":\n"get_weather",\n"arguments":\n{"city":\n"Lima"}}\n</tool_call>'
        .replace("\\n", "\n"),
        "", CITY,
    ),
    "qwen3-coder: only the function's mark": _case(
        "qwen3_coder", "<function=get_weather>\n<parameter=city>\nLima\n</parameter>\n</function>",
        "", CITY,
    ),
    "glm: indented": _case("glm45", _glm([CITY]).replace("\n", "\n    "), "", CITY),
    "glm: no end": _case(
        "glm45", _glm([CITY]).removesuffix("</tool_call>"), "", CITY
    ),
    "qwen3-coder: no end": _case(
        "qwen3_coder", _qwen3_coder([CITY]).removesuffix("\n</function>\n</tool_call>"), "", CITY
    ),
    "qwen3-coder: an end is missing between two": _case(
        "qwen3_coder", _qwen3_coder([CITY, CITY]).replace("\n</tool_call>", "", 1), "", CITY, CITY
    ),
    "llama: the other key": _case(
        "llama3_json", '{"name": "get_weather", "arguments": {"city": "Lima"}}', "", CITY
    ),
    "llama: no name": _case("llama3_json", '{"parameters": {}}', '{"parameters": {}}'),
    "llama: no parameters": _case("llama3_json", '{"name": "now"}', '{"name": "now"}'),
    "llama: spaces around separators": _case(
        "llama3_json", _llama([CITY, CITY, CITY]).replace("; ", " ;\n"), "", CITY, CITY, CITY
    ),
    "llama: two tags": _case(
        "llama3_json", f"<|python_tag|>{_llama([CITY])}" * 2, "", CITY, CITY
    ),
    "llama: text before the tag": _case(
        "llama3_json", f"I look. <|python_tag|>{_llama([CITY])}", "I look. ", CITY
    ),
    "llama: braces in the text after": _case(
        "llama3_json", f'{_llama([CITY])} I sent {{"city": "Lima"}}.',
        'I sent {"city": "Lima"}.', CITY,
    ),
    "pythonic: single quotes within": _case(
        "llama_pythonic", r"[f(a='Martha\'s', b='\"x\"')]", "", ("f", {"a": "Martha's", "b": '"x"'})
    ),
    "pythonic: a list that is an answer": _case(
        "llama_pythonic", "[1, 2] is a list (of 'two')", "[1, 2] is a list (of 'two')"
    ),
    "pythonic: no end": _case("llama_pythonic", "[f(a='\\", "[f(a='\\"),
    "pythonic: not finite": _case("llama_pythonic", "[f(x=1e999)]", "[f(x=1e999)]"),
    "pythonic: broken quotes": _case("llama_pythonic", "[f(a='x 'y' 'z)]", "[f(a='x 'y' 'z)]"),
    "pythonic: one bracket too many": _case("llama_pythonic", "[f(x=1])]", "[f(x=1])]"),
    "mistral: arguments first": _case(
        "mistral", '[TOOL_CALLS] [{"arguments": {"name": "Ann"}, "name": "get_age"}]', "",
        ("get_age", {"name": "Ann"}),
    ),
    "mistral: names with parts": _case(
        "mistral", '[TOOL_CALLS]add_this_and_that{"a": 3.5}[TOOL_CALLS]get-it.now[ARGS]{}', "",
        ("add_this_and_that", {"a": 3.5}), ("get-it.now", {}),
    ),
    "mistral: no JSON": _case("mistral", "[TOOL_CALLS] not at all", "[TOOL_CALLS] not at all"),
    "deepseek: no mark of a call": _case(
        "deepseek_v3", f"{V3_BEGIN}function<｜tool▁sep｜>f{V3_END}", "function<｜tool▁sep｜>f"
    ),
    "kimi: names with hyphens": _case(
        "kimi_k2", f"<|tool_call_begin|>functions.mcp__a__b-c:0{KIMI_ARGUMENTS}", "",
        ("mcp__a__b-c", CITY[1]),
    ),
    "kimi: no mark of a call": _case(
        "kimi_k2", f"f:0{KIMI_ARGUMENTS}", f"f:0{KIMI_ARGUMENTS}"
    ),
    "kimi: an end without a beginning": _case(
        "kimi_k2", "Text<|tool_calls_section_end|>", "Text"
    ),
}  # fmt: skip
