"""Rules of tokens in an engine: allowed ones, and words that no answer has."""

import numpy as np
import pytest

from tandem.engine.step.token_rules import TokenRules
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.messages import SamplingParams
from tests.engine.batch.test_masks import (
    EOS,
    VOCAB_SIZE,
    Answers,
    ListedTokens,
    answers,
    engine,
    model,
)

__all__ = ["answers", "engine", "model"]  # fixtures
HOT = SamplingParams(temperature=3.0, seed=5)


def allowed_by(rules: TokenRules) -> set[int]:
    words = rules.mask().view(np.uint32).tolist()
    return {i for i in range(VOCAB_SIZE) if words[i // 32] >> i % 32 & 1}


def test_only_the_last_token_of_a_bad_word_is_held_back_and_only_after_the_others() -> None:
    rules = TokenRules([], [[7], [1, 2, 3], [3]], VOCAB_SIZE, None, [])
    everything = set(range(VOCAB_SIZE))
    assert allowed_by(rules) == everything - {7, 3}
    rules = TokenRules([], [[1, 2, 3]], VOCAB_SIZE, None, [])
    for new, missing in (([], set()), ([1], set()), ([2], {3}), ([9], set()), ([1, 2], {3})):
        rules.begin(new)
        assert allowed_by(rules) == everything - missing
    assert rules.num_tokens == 5


def test_rules_and_a_grammar_hold_together_and_leave_an_error_where_nothing_is_left() -> None:
    rules = TokenRules([4, 5, 6], [[5]], VOCAB_SIZE, ListedTokens({4, 5, 9}, {9}), [])
    rules.begin([])
    assert rules.wait(None) and allowed_by(rules) == {4}
    rules.begin([4])
    with pytest.raises(InvalidRequestError, match="no token can follow after 1 of the answer"):
        rules.mask()


def test_answers_of_an_engine_keep_to_their_rules(answers: Answers) -> None:
    allowed = [31, 40, 41, 63]
    answers.add("few", TokenRules(allowed, [], VOCAB_SIZE, None, []), sampling=HOT)
    pairs = [[one, other] for one in allowed for other in allowed if one != other]
    same = TokenRules(allowed, pairs, VOCAB_SIZE, None, [])
    answers.add("same", same, sampling=HOT, min_tokens=3)
    ended = TokenRules([31, EOS], [[31, 31, 31]], VOCAB_SIZE, None, [])
    answers.add("ended", ended, sampling=HOT, min_tokens=3)
    answers.add("free", sampling=HOT)
    answers.finish()
    assert set(answers.tokens["few"]) <= set(allowed) and len(answers.tokens["few"]) == 8
    assert len(set(answers.tokens["same"])) == 1 and len(answers.tokens["same"]) == 8
    assert answers.tokens["ended"] == [31, 31] and answers.reasons["ended"] == "stop"
    assert not answers.errors
