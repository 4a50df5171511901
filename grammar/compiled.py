"""From a grammar to a matcher of llguidance, within limits."""

import re
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.printable import one_line
from tandem.runtime.wire.messages import Grammar

MAX_ERROR_BYTES = 400
_EXCERPT = re.compile(r"^ *\d+ \| .*\n( *\^\n)?", re.MULTILINE)  # of a Lark grammar

# Lower than llguidance's own, for masks; a trial bounds the time of compilation. A row has 4 items
# for each optional property: the answers to MaskBench's 2,500 hardest schemas have up to 1,040.
LIMITS = LLParserLimits(
    max_items_in_row=1_250,
    step_max_items=10_000,
    step_lexer_fuel=100_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


def load_tokenizer(path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """Load a tokenizer.json for a model's vocabulary. Raises ValueError when it does not fit.

    Holds the GIL throughout: about a second for 150,000 tokens.
    """
    return LLTokenizer(str(path), n_vocab=vocab_size, eos_token=list(eos_token_ids))


def compile_source(tokenizer: LLTokenizer, grammar: Grammar, source: str) -> LLMatcher:
    """Return a matcher at the start of an answer, with its first mask computed once.

    Raises InvalidRequestError for a grammar with a fault or over a limit. Without the GIL it may
    take long, or end the process: a worker compiles only a source that has passed a trial.
    """
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise grammar_error(grammar, matcher.get_error())
    return matcher


def grammar_error(grammar: Grammar, reason: str) -> InvalidRequestError:
    """Return the error of a grammar that cannot be followed."""
    reason = _EXCERPT.sub("", reason.replace("<non-verbose/>", ""))
    text = one_line(reason.strip(), MAX_ERROR_BYTES)
    return InvalidRequestError(f"the {grammar.kind}: {text}", param="grammar")
