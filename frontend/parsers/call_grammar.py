"""Grammars of answers with tool calls, in the call syntax of the model, and with reasoning first.

They are in llguidance's dialect of Lark. A special token stands in it by its id.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from tandem.frontend.openai.constraints import quoted
from tandem.frontend.openai.tools import Function
from tandem.frontend.parsers.argument_types import Allowed, ArgumentTypes
from tandem.frontend.parsers.formats import ReasoningFormat, ToolFormat
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.messages import Grammar

SpecialTokens = dict[str, int]  # text |-> id
_TEXT = "TEXT: /(.|\\n)*/"
_SPACE = "SPACE: /[ \\n]{0,8}/"
_NUMBER = "NUMBER: /[0-9]{1,3}/"


class AnswerGrammar:
    """The rules of one answer, as they are put together."""

    def __init__(self, special: SpecialTokens) -> None:
        self._special = special
        self.free: set[str] = set()  # functions whose arguments may be any
        self._rules = [_TEXT, _SPACE, _NUMBER]

    def body(self, grammar: Grammar, reasoning: ReasoningFormat | None) -> str:
        """Add the rule of an answer without calls. Returns it."""
        match grammar.kind:
            case "json_schema":
                self._rules.append(f"body: %json {grammar.source}")
            case "regex":
                self._rules.append(f"body: /{_for_slashes(grammar.source)}/")
            case _:  # alternatives of fixed texts
                self._rules.append("body: " + grammar.source.removeprefix("start: "))
        return f"{self._answer_mark(reasoning)} body".strip()

    def calls(self, tools: ToolFormat, functions: list[Function], *, one: bool) -> str:
        """Add the rules of an answer that only calls. Returns the name of the first one."""
        first, between, last = map(self._text, tools.section)
        call = self._alternatives(tools, functions, "")
        more = "" if one or not tools.repeats else f" ({between} {call})*"
        self._rules.append(f"calls: {first} {call}{more} {last}")
        return "calls"

    def text_and_calls(
        self,
        tools: ToolFormat,
        functions: list[Function],
        reasoning: ReasoningFormat | None,
        *,
        one: bool,
    ) -> str:
        """Add the rules of text in which a mark begins a call. Returns the name of the first."""
        mark = self._answer_mark(reasoning)
        if mark:
            return f"({self.calls(tools, functions, one=one)} | {mark} TEXT)"
        if tools.bare_begin:
            self._rules.append(f"words: /([^{re.escape(tools.bare_begin)}\\s](.|\\n)*)?/")
            return f"({self.calls(tools, functions, one=one)} | words)"
        section, between, last = tools.section
        trigger = section or next(iter(tools.begins))
        call = self._alternatives(tools, functions, "" if section else trigger)
        more = f" ({self._text(between)} {call})*" if section and not one else ""
        rest = f"{call}{more} {self._text(last)}"
        self._rules.append(f"part: {self._text_until(trigger, 'head')} {rest}")
        count = "?" if one else "*"
        self._rules.append(f"mixed: part{count} TEXT")
        return "mixed"

    def source(self, answer: str, reasoning: ReasoningFormat | None, *, is_open: bool) -> Grammar:
        """Return the whole grammar: reasoning first, which the prompt may have opened."""
        start = answer
        if reasoning is not None:
            thoughts = self._text_until(reasoning.end, "thoughts")
            begin = self._text(reasoning.begin)
            follow = f"{self._text(reasoning.next)} SPACE"
            first = f"{thoughts} {follow}" if is_open else f"({begin} {thoughts} {follow})?"
            start = f"{first} {answer}"
        return Grammar("lark", "\n".join([f"start: {start}", *self._rules]))

    def _answer_mark(self, reasoning: ReasoningFormat | None) -> str:
        return "" if reasoning is None else self._text(reasoning.answer)

    def _alternatives(self, tools: ToolFormat, functions: list[Function], done: str) -> str:
        """Add a rule for each function, without the text `done`. Returns their alternatives."""
        names = []
        for index, function in enumerate(functions):
            before, after = tools.call
            parts = [part.replace("%s", function.name) for part in before.split("%d")]
            head = " NUMBER ".join(map(self._text, [parts[0].removeprefix(done), *parts[1:]]))
            if function.name in self.free and tools.syntax is not None:
                tail = self._text_until(after, f"free_{index}")
            else:
                tail = f"{self._arguments(tools, function, index)} {self._text(after)}"
            self._rules.append(f"call_{index}: {head} {tail}")
            names.append(f"call_{index}")
        return f"({' | '.join(names)})"

    def _arguments(self, tools: ToolFormat, function: Function, index: int) -> str:
        is_free = function.name in self.free
        schema = {"type": "object"} | (function.parameters or {} if not is_free else {})
        if tools.syntax is None:
            return f"%json {json.dumps(schema)}"
        around = _AROUND[tools.syntax]
        required = schema.get("required", [])
        parts = []
        properties = schema.get("properties")
        if not isinstance(required, list) or not isinstance(properties, dict | None):
            raise InvalidRequestError(
                "`tools`: the `properties` of a schema are an object, `required` is a list",
                param="tools",
            )
        properties = properties or {}
        ordered = sorted(properties, key=lambda name: name not in required)
        types = ArgumentTypes(schema)
        for place, name in enumerate(ordered):
            rule = f"value_{index}_{place}"
            before, after = around(name)
            value = self._value(types.of(name), properties[name], schema)
            until = (
                f"{value} {self._text(after)}" if value else self._text_until(after, f"{rule}_text")
            )
            self._rules.append(f"{rule}: {self._text(before)} {until}")
            parts.append(rule if name in required else f"{rule}?")
        return " ".join(parts)

    def _value(self, allowed: Allowed, schema: Any, whole: dict[str, Any]) -> str:
        """Return a value; empty for any text. Strings stand without quotes."""
        if allowed.is_text:
            return ""
        if not allowed.types:  # single values
            return f"({' | '.join(map(_bare, allowed.single.values()))})"
        definitions = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
        inner = {} if schema is True or not isinstance(schema, dict) else schema
        return f"%json {json.dumps(definitions | inner)}"

    def _text_until(self, end: str, rule: str) -> str:
        """Add a rule for any text and the start of `end`. Returns the rule and the rest of `end`.

        A lazy rule is one terminal, in which no special token may be; TEXT has none either.
        """
        first, *rest = self._parts(end)
        self._rules.append(f"{rule}{'' if first[0] == '<' else '[lazy]'}: TEXT {first}")
        return " ".join([rule, *rest])

    def _text(self, text: str) -> str:
        return " ".join(self._parts(text))

    def _parts(self, text: str) -> list[str]:
        """Return a fixed text as Lark has it."""
        present = [token for token in self._special if token in text]
        pattern = "|".join(map(re.escape, sorted(present, key=len, reverse=True))) or r"(?!)"
        return [
            f"<[{self._special[part]}]>" if part in self._special else quoted(part)
            for part in re.split(f"({pattern})", text)
            if part
        ]


def _bare(value: object) -> str:
    """Return a single value as it stands in an argument, as Lark has it."""
    return quoted(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _for_slashes(regex: str) -> str:
    """Return a regex as it stands between two slashes, in one line."""
    escapes = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return re.sub(r"(?s)\\.|[/\n]", lambda found: escapes.get(found[0], found[0]), regex)


def _function_xml(name: str) -> tuple[str, str]:
    return f"<parameter={name}>\n", "\n</parameter>\n"


def _arg_key_xml(name: str) -> tuple[str, str]:
    return f"<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>\n"


_AROUND: dict[str, Callable[[str], tuple[str, str]]] = {
    "function_xml": _function_xml,
    "arg_key_xml": _arg_key_xml,
}
