"""Bounds of a tokenizer.json, which a model's author wrote: growth of texts, length of tokens.

A normalizer of a few replacements makes gigabytes of a short text, and a regular expression may
take minutes for it, so both are looked at before any text is given to them.
"""

import base64
import binascii
import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from tandem.runtime.errors import ModelError

MAX_GROWTH = 256  # of a text, in bytes for each; NFKC makes up to 33 of one
MAX_TOKEN_CHARACTERS = 8192
# The families of Llama 3, Qwen2 and Qwen3.5. What these leave to one another takes no time.
QUICK = frozenset(
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^\s{rest}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    for letters, digits, rest in (
        (r"\p{L}", r"\p{N}{1,3}", r"\p{L}\p{N}"),
        (r"\p{L}", r"\p{N}", r"\p{L}\p{N}"),
        (r"[\p{L}\p{M}]", r"\p{N}", r"\p{L}\p{M}\p{N}"),
    )
)


def checked_longest_token(tokenizer: Tokenizer) -> int:
    """Return the characters of the longest token.

    Raises ModelError for a tokenizer whose texts or tokens have no reasonable bound.
    """
    for name, part in (("normalizer", tokenizer.normalizer), ("decoder", tokenizer.decoder)):
        growth = 1
        for step in steps_of(part):
            growth *= _growth(step)
            if growth > MAX_GROWTH:
                raise ModelError(
                    f"tokenizer.json: the {name} makes over {MAX_GROWTH} characters of one"
                )
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    if longest > MAX_TOKEN_CHARACTERS:
        raise ModelError(
            f"tokenizer.json: a token has {longest} characters, the most is {MAX_TOKEN_CHARACTERS}"
        )
    return longest


def is_quick(tokenizer: Tokenizer) -> bool:
    """Return True if short texts take no time: each regular expression is one that is known."""
    steps = (*steps_of(tokenizer.normalizer), *steps_of(tokenizer.pre_tokenizer))
    patterns = [step["pattern"] for step in steps if "pattern" in step]
    return all("Regex" not in each or each["Regex"] in QUICK for each in patterns)


def steps_of(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer, pre-tokenizer or decoder, in turn, as their JSON says them.

    A sequence is a step before its own.
    """
    todo = [] if part is None else [json.loads(part.__getstate__())]
    while todo:
        step = todo.pop(0)
        yield step
        for name in ("normalizers", "pretokenizers", "decoders"):
            todo = [*step.get(name, ()), *todo]


def _growth(step: dict[str, Any]) -> int:
    """Return the most characters that a step makes of one."""
    match step["type"]:
        case "Replace":
            # a regular expression may match no character, between any two
            matched, made = len(step["pattern"].get("String", "")), len(step["content"])
            return max(1, -(-made // matched)) if matched else 1 + made
        case "Prepend":
            return max(1, len(step["prepend"]))
        case "Precompiled":
            return _longest_replacement(step["precompiled_charsmap"])
    return 1


def _longest_replacement(charsmap: str) -> int:
    """Return the length of the longest text in a map of SentencePiece.

    The map is the size of a trie, the trie, and texts with a zero after each.
    """
    try:
        data = base64.b64decode(charsmap or "")
    except (binascii.Error, ValueError):
        return MAX_GROWTH + 1
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(map(len, texts.split(b"\0")), default=1) or 1
