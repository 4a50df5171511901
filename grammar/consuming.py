"""Taking tokens into a matcher, without Python's lock where that may last.

An ambiguous grammar makes a token cost more the longer the answer is: milliseconds after some
hundred tokens, within the limits of llguidance. `consume_token` holds the lock all that time.
"""

import threading

from llguidance import LLExecutor, LLMatcher, LLTokenizer


class Consumer(threading.local):
    """Takes tokens while other threads run, in 40 µs or more. Each thread has one of its own."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._executor = LLExecutor(1)
        # llguidance releases the lock for two matchers or more. This one takes no token.
        self._other = LLMatcher(tokenizer, "", log_level=0)
        assert self._other.is_error()

    def consume(self, matcher: LLMatcher, token_id: int) -> bool:
        """Take a token into `matcher`. Return False for one that it does not allow."""
        is_taken, _ = self._executor.consume_token_par([(matcher, token_id), (self._other, 0)])
        return is_taken
