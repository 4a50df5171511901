"""Grammars of answers with tool calls, in the call syntax of the model, and with reasoning first.

They are in llguidance's dialect of Lark. A special token stands in it by its id.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tandem.frontend.bodies.invalid import invalid_field
from tandem.frontend.chat.constraints import quoted
from tandem.frontend.chat.tools import Function
from tandem.frontend.parsers.argument_types import Allowed, ArgumentTypes
from tandem.frontend.parsers.formats import ReasoningFormat, ToolFormat
from tandem.frontend.parsers.text_rules import (
    arguments_of,
    for_slashes,
    text_expression,
    unkept_paths,
)
from tandem.runtime import json_schema
from tandem.runtime.wire.messages import LARGEST_GRAMMAR_BYTES, Grammar

SpecialTokens = dict[str, int]  # text |-> id
_TEXT = "TEXT: /(.|\\n)*/"
_SPACE = "SPACE: /[ \\n]{0,8}/"
_NUMBER = "NUMBER: /[0-9]{1,3}/"


class AnswerGrammar:
    """The rules of one answer, as they are put together.

    `fields` has the fields of the client's schemas: those of functions by their names.
    """

    def __init__(self, special: SpecialTokens, fields: Mapping[str, str] | None = None) -> None:
        self._special = special
        self._fields = fields or {}
        self.free: set[str] = set()  # functions whose arguments may be any
        self.places: dict[int, str] = {}  # line of the grammar |-> field of the schema in it
        self.unkept: list[str] = []  # fields that no grammar can keep, left out
        self._num_bytes = 0
        self._rules = [_TEXT, _SPACE, _NUMBER]

    def body(self, grammar: Grammar, reasoning: ReasoningFormat | None, field: str = "") -> str:
        """Add the rule of an answer without calls; `field` has its schema. Returns the rule."""
        match grammar.kind:
            case "json_schema":
                self._add_schema(f"body: %json {grammar.source}", field)
            case "regex":
                self._rules.append(f"body: /{for_slashes(grammar.source)}/")
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
            rule = f"call_{index}: {head} {tail}"
            self._add_schema(rule, self._fields.get(function.name, "tools"))
            names.append(f"call_{index}")
        return f"({' | '.join(names)})"

    def _add_schema(self, rule: str, field: str) -> None:
        """Add a rule with the schema of a field. Raises InvalidRequestError for too many bytes."""
        self._rules.append(rule)
        self.places[len(self._rules) + 1] = field  # the first line is that of the start
        self._num_bytes += len(rule)
        if self._num_bytes > LARGEST_GRAMMAR_BYTES:
            reason = f"makes a grammar of over {LARGEST_GRAMMAR_BYTES} bytes"
            raise invalid_field(field or "tools", reason)

    def _schema_of(self, function: Function, *, is_bare: bool) -> dict[str, Any]:
        """Return the schema of a function's arguments, as far as a grammar can keep it.

        That of a strict one is kept whole, or refused. Bare arguments stand without quotes.
        """
        schema: Any = {"type": "object"} | (function.parameters or {})
        field = self._fields.get(function.name, "tools")
        paths: list[json_schema.Path] = []
        if not function.strict and '"uniqueItems"' in json.dumps(schema):
            schema, paths = json_schema.without("uniqueItems", schema)
        if is_bare and (bare := unkept_paths(schema, arguments_of(schema))):
            if function.strict:
                raise invalid_field(
                    field + json_schema.text_of(bare[0]),
                    "cannot be kept where the model writes arguments without quotes",
                )
            paths += bare
        self.unkept += [field + json_schema.text_of(path) for path in paths]
        return dict(schema)

    def _arguments(self, tools: ToolFormat, function: Function, index: int) -> str:
        if function.name in self.free:
            return '%json {"type": "object"}'
        schema = self._schema_of(function, is_bare=tools.syntax is not None)
        if tools.syntax is None:
            return f"%json {json.dumps(schema)}"
        field = self._fields.get(function.name, "tools")
        path = arguments_of(schema)
        here = json_schema.at(schema, path)
        required, properties = here.get("required", []), here.get("properties", {})
        if not isinstance(required, list):
            raise invalid_field(f"{field}.required", "must be a list")
        if not isinstance(properties, dict):
            raise invalid_field(f"{field}.properties", "must be an object")
        properties = {name: True for name in required if isinstance(name, str)} | properties
        parts, names = json_schema.Parts(schema), []
        ordered = sorted(properties, key=lambda name: name not in required)
        types = ArgumentTypes(schema)
        for place, name in enumerate(ordered):
            rule, inner = f"value_{index}_{place}", (*path, "properties", name)
            before, after = _AROUND[tools.syntax](name)
            value = self._value(types.of(name), properties[name], parts, inner)
            if value:
                until = f"{value} {self._text(after)}"
            else:
                until = self._bare_text(rule, properties[name], after)
            is_alone = not json_schema.has_references(properties[name])
            where = json_schema.text_of(inner) if is_alone else ""
            self._add_schema(f"{rule}: {self._text(before)} {until}", field + where)
            names.append(rule if name in required else f"{rule}?")
        return " ".join(names)

    def _value(
        self, allowed: Allowed, schema: Any, parts: json_schema.Parts, path: json_schema.Path
    ) -> str:
        """Return a value; empty for any text. Strings stand without quotes."""
        if allowed.is_text:
            return ""
        if not allowed.types:  # single values
            return f"({' | '.join(map(_bare, allowed.single.values()))})"
        return f"%json {parts.at(path) if isinstance(schema, dict) else '{}'}"

    def _bare_text(self, rule: str, schema: Any, after: str) -> str:
        """Return a string without quotes, by its constraints, and the text after it."""
        if expression := text_expression(schema, after.strip()):
            self._rules.append(f"{rule.upper()}: {expression}")
            return self._text_until(after, f"{rule}_text", rule.upper())
        return self._text_until(after, f"{rule}_text")

    def _text_until(self, end: str, rule: str, text: str = "TEXT") -> str:
        """Add a rule for a text and the start of `end`. Returns the rule and the rest of `end`.

        A lazy rule is one terminal, in which no special token may be; TEXT has none either.
        """
        first, *rest = self._parts(end)
        self._rules.append(f"{rule}{'' if first[0] == '<' else '[lazy]'}: {text} {first}")
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


def _function_xml(name: str) -> tuple[str, str]:
    return f"<parameter={name}>\n", "\n</parameter>\n"


def _arg_key_xml(name: str) -> tuple[str, str]:
    return f"<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>\n"


_AROUND: dict[str, Callable[[str], tuple[str, str]]] = {
    "function_xml": _function_xml,
    "arg_key_xml": _arg_key_xml,
}
