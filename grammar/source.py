"""Grammars of requests as the source text that llguidance takes."""

import json
import re
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from tandem.grammar.compiled import LIMITS, compile_source, grammar_error
from tandem.grammar.schemas import fault_of, prepared, schemas_in_lark
from tandem.grammar.structural_tag import structural_tag_lark
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.messages import Grammar

# White space between the parts of a JSON value: a space, or a line break and an indentation. With
# more of it a model may write nothing else.
WHITESPACE = r"\x20|\x0D?\x0A(\x20{0,32}|\x09{0,8})"
_REFERENCE = re.compile(r"json-schema:///#|/[$]defs/whole")
_WHERE = "\n  while processing "


def tried_source(grammar: Grammar, tokenizer: LLTokenizer) -> str:
    """Return the source of llguidance's matcher for a grammar that compiles within limits.

    Raises InvalidRequestError, which names a faulty schema by its path; see `fault_of`.
    """
    try:
        source = matcher_source(grammar, tokenizer)
        compile_source(tokenizer, grammar, source)
        return source
    except InvalidRequestError as error:
        raise fault_of(grammar, error, lambda schema: _refusal(schema, tokenizer)) from None


def _refusal(schema: Any, tokenizer: LLTokenizer) -> str:
    """Return the reason against a schema; empty if it compiles."""
    try:
        source = json_source(schema, tokenizer)
    except ValueError as error:
        return str(error)
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error():
        return ""
    return _REFERENCE.sub("", matcher.get_error().partition(_WHERE)[0])


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
            return json_source(json.loads(source), tokenizer)
        case "regex":
            return LLMatcher.grammar_from_regex(source)
        case "lark":
            return LLMatcher.grammar_from_lark(with_prepared_json(source, tokenizer))
        case "gbnf":
            return LLMatcher.grammar_from_lark(gbnf_to_lark(source))
        case "structural_tag":
            lark = structural_tag_lark(json.loads(source), tokenizer)
            return LLMatcher.grammar_from_lark(with_prepared_json(lark, tokenizer))


def json_source(schema: Any, tokenizer: LLTokenizer) -> str:
    """Return the source for values of a JSON schema; `true` is any value."""
    if isinstance(schema, bool):
        if not schema:
            raise ValueError("the schema false allows no value")
        schema = {}
    schema = prepared(schema, lambda expression: _is_empty(expression, tokenizer))
    return LLMatcher.grammar_from_json_schema(schema, None, {"whitespace_pattern": WHITESPACE})


def with_prepared_json(lark: str, tokenizer: LLTokenizer) -> str:
    """Return a Lark grammar in which each `%json` schema is as `json_source` has it."""
    parts, end = [], 0
    for start, after, schema in schemas_in_lark(lark):
        schema = {} if schema is True else schema
        schema = prepared(schema, lambda expression: _is_empty(expression, tokenizer))
        options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        parts += [lark[end:start], json.dumps(schema | options)]
        end = after
    return "".join([*parts, lark[end:]])


def _is_empty(expression: str, tokenizer: LLTokenizer) -> bool:
    """Return True if no text matches a Lark expression."""
    lark = LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {expression}")
    matcher = LLMatcher(tokenizer, lark, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return bool(matcher.is_error())
