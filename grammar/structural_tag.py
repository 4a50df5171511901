"""Structural tags: free text in which each trigger begins a part that follows a schema.

The form is that of vLLM and SGLang: `structures`, each of `begin`, `schema` and `end`, and
`triggers`, one of which each `begin` starts with.
"""

import json
from typing import Any

import msgspec
from llguidance import LLTokenizer


class Structure(msgspec.Struct, forbid_unknown_fields=True):
    """A part of the answer between two fixed texts."""

    begin: str
    end: str
    schema: dict[str, Any] | bool = True


class StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    """The parts that an answer may have beside its text."""

    structures: list[Structure]
    triggers: list[str]
    type: str = "structural_tag"


def structural_tag_lark(source: Any, tokenizer: LLTokenizer) -> str:
    """Return a Lark grammar. Raises ValueError, which names the field at fault."""
    tag = msgspec.convert(source, StructuralTag)
    if not tag.structures or not all(tag.triggers):
        raise ValueError("structures and triggers need at least one entry, which is not empty")
    rules = ["TEXT: /(.|\\n)*/"]
    for i, structure in enumerate(tag.structures):
        # The shortest: the text after it follows a grammar before a longer one is complete.
        found = [each for each in tag.triggers if structure.begin.startswith(each)]
        if not (trigger := min(found, key=len, default="")):
            raise ValueError(f"structures[{i}].begin starts with none of the triggers")
        rest = _text(structure.begin[len(trigger) :], tokenizer)
        schema = {} if structure.schema is True else structure.schema
        if schema is False:
            raise ValueError(f"structures[{i}].schema allows no value")
        body = f"{rest} %json {json.dumps(schema)} {_text(structure.end, tokenizer)}"
        if _is_special(trigger, tokenizer):
            rules.append(f"part_{i}: TEXT {trigger} {body}")
        else:
            rules.append(f"head_{i}[lazy]: TEXT {json.dumps(trigger)}")
            rules.append(f"part_{i}: head_{i} {body}")
    parts = " | ".join(f"part_{i}" for i in range(len(tag.structures)))
    return "\n".join([f"start: ({parts})* rest", "rest: TEXT", *rules])


def _text(text: str, tokenizer: LLTokenizer) -> str:
    """Return a fixed text for Lark; the special tokens in it stand for themselves."""
    token_ids = tokenizer.tokenize_str(text, parse_special=True)
    parts, plain = [], b""
    for token_id in token_ids:
        if tokenizer.is_special_token(token_id):
            parts += [_quoted(plain), tokenizer.decode_str([token_id])]
            plain = b""
        else:
            plain += tokenizer.decode_bytes([token_id])
    return " ".join(part for part in [*parts, _quoted(plain)] if part)


def _quoted(plain: bytes) -> str:
    return json.dumps(plain.decode()) if plain else ""


def _is_special(text: str, tokenizer: LLTokenizer) -> bool:
    token_ids = tokenizer.tokenize_str(text, parse_special=True)
    return len(token_ids) == 1 and tokenizer.is_special_token(token_ids[0])
