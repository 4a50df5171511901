"""Grammars of requests as the source text that llguidance takes."""

import json
import re
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from tandem.grammar.compiled import grammar_error
from tandem.grammar.structural_tag import structural_tag_lark
from tandem.runtime.messages import Grammar

# White space between the parts of a JSON value: a space, or a line break and an indentation. With
# more of it a model may write nothing else.
WHITESPACE = r"\x20|\x0D?\x0A(\x20{0,32}|\x09{0,8})"
_JSON_IN_LARK = re.compile(r"%json\s*(?=\{|true\b)")


def matcher_source(grammar: Grammar, tokenizer: LLTokenizer) -> str:
    """Return the source of llguidance's matcher. Raises InvalidRequestError, which says where."""
    try:
        return _source(grammar, tokenizer)
    except Exception as error:  # the conversion of GBNF raises no narrower type
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise grammar_error(grammar, reason) from None


def _source(grammar: Grammar, tokenizer: LLTokenizer) -> str:
    source = grammar.source
    match grammar.kind:
        case "json_schema":
            return json_source(json.loads(source))
        case "regex":
            return LLMatcher.grammar_from_regex(source)
        case "lark":
            return LLMatcher.grammar_from_lark(with_bounded_json(source))
        case "gbnf":
            return LLMatcher.grammar_from_lark(gbnf_to_lark(source))
        case "structural_tag":
            return LLMatcher.grammar_from_lark(
                with_bounded_json(structural_tag_lark(json.loads(source), tokenizer))
            )


def json_source(schema: Any) -> str:
    """Return the source for values of a JSON schema; `true` is any value."""
    if isinstance(schema, bool):
        if not schema:
            raise ValueError("the schema false allows no value")
        schema = {}
    return LLMatcher.grammar_from_json_schema(schema, None, {"whitespace_pattern": WHITESPACE})


def with_bounded_json(lark: str) -> str:
    """Return a Lark grammar in which the white space of each `%json` schema is bounded."""
    parts, end = [], 0
    while (found := _JSON_IN_LARK.search(lark, end)) is not None:
        schema, after = json.JSONDecoder().raw_decode(lark, found.end())
        schema = {} if schema is True else schema
        guidance = schema.get("x-guidance", {}) | {"whitespace_pattern": WHITESPACE}
        bounded = json.dumps(schema | {"x-guidance": guidance})
        parts += [lark[end : found.end()], bounded]
        end = after
    return "".join([*parts, lark[end:]])
