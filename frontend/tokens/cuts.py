"""Long texts in parts that may be tokenized beside one another, with the same tokens.

A part begins with a space behind a letter or digit. All of the regular expressions here end a word
there, whatever is before and behind: none matches a space behind another character than one, none
looks back, and only whitespace looks ahead. A normalizer of theirs joins nothing to a space either.
"""

from tokenizers import Tokenizer

from tandem.frontend.tokens.tokenizer_bounds import QUICK, steps_of

PART_CHARACTERS = 8192
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# The families of gpt-oss and of Mistral Nemo
_OF_CASES = frozenset(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{suffix}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{suffix}"
    rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for suffix, digits in (("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}"), ("", r"\p{N}"))
)
EXPRESSIONS = QUICK | _OF_CASES


def may_be_cut(tokenizer: Tokenizer) -> bool:
    """Return True if the parts of a text have the tokens of the whole."""
    normalizers = [step["type"] for step in steps_of(tokenizer.normalizer)]
    if not {*normalizers} <= {"NFC", "Sequence"}:
        return False
    added = tokenizer.get_added_tokens_decoder().values()
    if any(" " in token.content or token.rstrip for token in added):
        return False
    steps = [step for step in steps_of(tokenizer.pre_tokenizer) if step["type"] != "Sequence"]
    for index, step in enumerate(steps):
        match step:
            case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}:
                ends_words = regex in EXPRESSIONS and not step["invert"]
            case {"type": "ByteLevel", "add_prefix_space": False}:
                ends_words = step["use_regex"] or index > 0
            case _:
                ends_words = False
        if not ends_words:
            return False
    return bool(steps)


def parts_of(text: str, num_characters: int = PART_CHARACTERS) -> list[str]:
    """Return the parts of a text, each of at least `num_characters` but the last."""
    parts, start = [], 0
    while (end := _next_cut(text, start + num_characters)) > 0:
        parts.append(text[start:end])
        start = end
    return [*parts, text[start:]]


def _next_cut(text: str, start: int) -> int:
    """Return the place of the next space behind a letter or digit; -1 without one."""
    place = text.find(" ", start)
    while place >= 0 and not text[place - 1].isalnum():
        place = text.find(" ", place + 1)
    return place
