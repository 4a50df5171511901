"""The tokens that a request allows, and the words that it does not, beside any grammar."""

from collections.abc import Sequence

import numpy as np

from tandem.engine.schedule.matcher import Matcher, Words
from tandem.runtime.errors import InvalidRequestError


class TokenRules:
    """A Matcher of the tokens in `allowed`, all if it is empty, that end none of the `bad_words`.

    `grammar` has to allow them too; it stands where `answer`, generated elsewhere, ends.
    """

    def __init__(
        self,
        allowed: Sequence[int],
        bad_words: Sequence[Sequence[int]],
        vocab_size: int,
        grammar: Matcher | None,
        answer: list[int],
    ) -> None:
        self.forced: list[int] = []
        self.num_tokens = 0 if grammar is None else grammar.num_tokens
        self._grammar = grammar
        self._bad_words = [list(word) for word in bad_words]
        self._num_kept = max((len(word) for word in self._bad_words), default=0)
        self._last = answer[: self.num_tokens]
        self._allowed = np.zeros(-(-vocab_size // 32), np.uint32)
        token_ids = np.asarray(allowed, np.int64) if allowed else np.arange(vocab_size)
        bits = np.uint32(1) << (token_ids % 32).astype(np.uint32)
        np.bitwise_or.at(self._allowed, token_ids // 32, bits)

    def begin(self, new_tokens: list[int]) -> None:
        self.num_tokens += len(new_tokens)
        self._last = (self._last + new_tokens)[-self._num_kept :] if self._num_kept else []
        if self._grammar is not None:
            self._grammar.begin(new_tokens)

    def wait(self, timeout_s: float | None) -> bool:
        return self._grammar is None or self._grammar.wait(timeout_s)

    def mask(self) -> Words:
        mask = self._allowed.copy()
        if self._grammar is not None:
            mask &= self._grammar.mask().view(np.uint32)
        for *begin, last in self._bad_words:
            if not begin or self._last[-len(begin) :] == begin:
                mask[last // 32] &= ~np.uint32(1 << last % 32)
        if not mask.any():
            raise InvalidRequestError(
                f"no token can follow after {self.num_tokens} of the answer",
                param="allowed_token_ids",
            )
        return mask.view(np.int32)
