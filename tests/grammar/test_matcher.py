"""The thread on which an answer's masks are computed."""

import ctypes
import json
import random
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tandem.grammar.compiled import compile_source, load_tokenizer
from tandem.grammar.matcher import NUM_WATCHED, GrammarMatcher, MaskThreads
from tandem.grammar.source import matcher_source
from tandem.models.paths import BUNDLED_MODEL
from tandem.runtime.messages import Grammar
from tests.grammar.answers import CASES
from tests.grammar.conftest import EOS, VOCAB_SIZE

LONG_S = 0.3
TOKENS = load_tokenizer(BUNDLED_MODEL / "tokenizer.json", VOCAB_SIZE, (EOS,))
NOTE = {"type": "object", "properties": {"note": {"type": "string", "maxLength": 40}}}
TEXT = r"TEXT: /[^<]{0,300}/"
GRAMMARS = {  # with long parts in which most tokens may follow
    "regex": Grammar("regex", "([A-Z]?[a-z]{1,12}[,.]? ?){50}"),
    "json_schema": Grammar("json_schema", json.dumps({**NOTE, "required": ["note"]})),
    "lark": Grammar("lark", f'start: (TEXT "<" /[0-9]/ ">")+\n{TEXT}'),
    "special tokens": Grammar("lark", f"start: (TEXT <|im_start|>)+\n{TEXT}"),
    "no forcing": Grammar(
        "lark", f'%llguidance {{"no_forcing": true}}\nstart: TEXT "<end>"\n{TEXT}'
    ),
    "structural_tag": CASES["structural_tag"].grammar,
}


class AnyToken:
    """The part of an LLMatcher that masks take; it allows two tokens at any place."""

    def __init__(self) -> None:
        self.seconds = 0.0  # of the next mask
        self.on_main: list[bool] = []

    def consume_token(self, token_id: int) -> bool:
        assert token_id in (0, 1)
        return True

    def is_error(self) -> bool:
        return False

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        assert num_bytes == 4
        self.on_main.append(threading.current_thread() is threading.main_thread())
        ctypes.c_uint32.from_address(address).value = 3
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass


@pytest.fixture
def threads() -> Iterator[MaskThreads]:
    threads = MaskThreads()
    yield threads
    threads.close()


def test_masks_after_one_that_took_long_are_computed_by_other_threads(
    threads: MaskThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.grammar.matcher.QUICK_S", LONG_S / 2)  # on a busy machine
    tokens = AnyToken()
    matcher = GrammarMatcher(tokens, Grammar("regex", "."), 32, threads)  # type: ignore[arg-type]
    matcher.begin([])
    for seconds in (0.0, 0.0, LONG_S, *[0.0] * (NUM_WATCHED + 1)):
        assert matcher.wait(10.0)
        assert matcher.mask().tolist() == [3]
        tokens.seconds = seconds
        matcher.begin([1])
    assert matcher.wait(10.0)
    first, quick, slow, rest = [False], [True] * 2, [True], [False] * NUM_WATCHED
    assert tokens.on_main == [*first, *quick, *slow, *rest, True]


def allowed_by(matcher: GrammarMatcher) -> list[int]:
    assert matcher.wait(10.0)
    return np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_check_allows_the_tokens_of_the_mask(threads: MaskThreads, name: str) -> None:
    """Of the whole vocabulary, anywhere in an answer; a forced token is not checked."""
    grammar = GRAMMARS[name]
    root = compile_source(TOKENS, grammar, matcher_source(grammar, TOKENS))
    num_checked = 0
    for seed in range(6):
        draw = random.Random(seed)
        checked, masked = (
            GrammarMatcher(root.deep_copy(), grammar, VOCAB_SIZE, threads) for _ in range(2)
        )
        new_tokens: list[int] = []
        for _ in range(60):
            masked.begin(new_tokens)
            allowed = allowed_by(masked)
            if checked.begin(new_tokens, may_check=True):
                assert not checked.forced and not masked.forced
                usual = [token_id for token_id in range(VOCAB_SIZE) if token_id != EOS]
                assert [each for each in usual if checked.allows(each)] == [
                    each for each in allowed if each != EOS
                ]
                num_checked += 1
                if draw.random() < 0.3:
                    checked.begin([])
                    assert allowed_by(checked) == allowed
            else:
                assert allowed_by(checked) == allowed and checked.forced == masked.forced
            if allowed == [EOS]:
                break
            new_tokens = [draw.choice([each for each in allowed if each != EOS])]
    assert num_checked > 20
