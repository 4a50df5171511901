"""The masks of one answer.

Most take a few microseconds, less than a thread takes to wake: the engine's thread computes them
itself while the device computes. After one that took long those that follow go to other threads.
"""

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from tandem.grammar.compiled import grammar_error
from tandem.grammar.consuming import Consumer
from tandem.runtime.errors import InternalError, InvalidRequestError, TandemError
from tandem.runtime.native import fault_of
from tandem.runtime.wire.messages import Grammar

logger = logging.getLogger(__name__)

NUM_THREADS = 4  # a mask that takes long holds one of them
QUICK_S = 0.3e-3
NUM_WATCHED = 8  # masks on other threads after each that was not quick
MAX_AHEAD = 32  # forced tokens that are looked for at a time
# Of an answer's masks, in seconds of CPU time: at most for a start, and added for each token. The
# costliest of 4,000 answers to MaskBench's hardest schemas takes 0.15 ms for a token.
BUDGET_S = 0.5
TOKEN_BUDGET_S = 2e-3
REPLAY_S = 5.0  # of an answer that was generated elsewhere


class MaskThreads:
    """Threads that compute masks; started by the first, and ended by `close`."""

    def __init__(self) -> None:
        self._due: SimpleQueue[GrammarMatcher | None] = SimpleQueue()
        self._is_started = False

    def put(self, matcher: "GrammarMatcher") -> None:
        """Have a thread compute the next mask of `matcher`."""
        if not self._is_started:
            self._is_started = True
            for i in range(NUM_THREADS):
                threading.Thread(target=self._run, name=f"tandem-mask-{i}", daemon=True).start()
        self._due.put(matcher)

    def close(self) -> None:
        for _ in range(NUM_THREADS):
            self._due.put(None)

    def _run(self) -> None:
        while (matcher := self._due.get()) is not None:
            matcher.compute()


class GrammarMatcher:
    """The engine's Matcher: the tokens that a grammar allows after an answer so far."""

    def __init__(
        self,
        matcher: LLMatcher,
        grammar: Grammar,
        vocab_size: int,
        threads: MaskThreads,
        consumer: Consumer,
    ) -> None:
        self._matcher = matcher
        self._grammar = grammar
        self._threads = threads
        self._consumer = consumer
        self._mask_s = 0.0  # the time of the last mask
        self._budget_s = BUDGET_S
        self._mask = np.zeros(-(-vocab_size // 32), np.int32)
        self._words = self._mask.view(np.uint32)
        self._address, self._num_bytes = self._mask.ctypes.data, self._mask.nbytes
        self._new_tokens: list[int] = []
        self.forced: list[int] = []  # they come before the mask that was computed
        self._num_watched = 1  # the first is computed while the sequence is queued
        self._is_due_here = False
        self._error: TandemError | None = None
        self._has_mask = False
        self._has_tokens = False  # of `begin`
        self._is_done = threading.Event()
        self._is_done.set()
        self._lock = threading.Lock()  # of what follows, while another thread is at work
        self._later: list[int] = []  # tokens that came before their mask was computed
        self.num_tokens = 0

    def replay(self, answer: list[int]) -> None:
        """Move behind tokens that were generated elsewhere. Raises InvalidRequestError."""
        end = time.perf_counter() + REPLAY_S
        for token_id in answer:
            if not self._consumer.consume(self._matcher, token_id):
                raise InvalidRequestError(
                    f"the {self._grammar.kind} does not allow token {self.num_tokens} of the "
                    "answer so far",
                    param="grammar",
                )
            self.num_tokens += 1
            if time.perf_counter() > end:
                raise self._too_costly(f"takes over {REPLAY_S:g} s to follow")

    def begin(self, new_tokens: list[int]) -> None:
        if not new_tokens and self._has_mask:
            return
        # The first token of a prompt computed elsewhere was drawn under another matcher's mask.
        is_first, self._has_tokens = not self._has_tokens, self._has_tokens or bool(new_tokens)
        assert not self._is_due_here and (self._is_done.is_set() or is_first), (
            "a token was drawn without the mask that is being computed"
        )
        self.num_tokens += len(new_tokens)
        with self._lock:
            if not self._is_done.is_set():
                self._later += new_tokens
                return
        new_tokens = self._behind_forced(new_tokens)
        if not new_tokens and self._has_mask:
            return
        self._has_mask = True
        self._new_tokens = new_tokens
        if self._num_watched:
            self._is_done.clear()
            self._threads.put(self)
        else:
            self._is_due_here = True

    def _behind_forced(self, new_tokens: list[int]) -> list[int]:
        """Return the tokens that the grammar has not taken in, as forced ones, already."""
        while new_tokens and self.forced and new_tokens[0] == self.forced[0]:
            new_tokens = new_tokens[1:]
            del self.forced[0]
        return new_tokens

    def wait(self, timeout_s: float | None) -> bool:
        if not self._is_due_here:
            return self._is_done.wait(timeout_s)
        self._is_due_here = False
        self._compute(time.perf_counter)
        return True

    def mask(self) -> "npt.NDArray[np.int32]":
        assert self._is_done.is_set()
        if self.forced:
            return _mask_of(self.forced[0], self._mask)
        if self._error is not None:
            raise self._error
        return self._mask

    def compute(self) -> None:
        """Compute the mask that `begin` has asked for, and wake the engine's thread."""
        is_due = True
        while is_due:
            self._compute(time.thread_time)  # the thread may wait for the interpreter
            with self._lock:
                later, self._later = self._later, []
                self._new_tokens = self._behind_forced(later)
                is_due = bool(self._new_tokens)
                if not is_due:
                    self._is_done.set()

    def _compute(self, clock: Callable[[], float]) -> None:
        started, cpu_started = clock(), time.thread_time()
        self.forced = []
        try:
            for token_id in self._new_tokens:
                self._consume(token_id)
            self._look_ahead(clock)
        except BaseException as error:
            logger.exception("a mask could not be computed: %s", fault_of(error))
            self._error = InternalError("a mask of the answer's grammar could not be computed")
        finally:
            if clock() - started >= QUICK_S:
                self._num_watched = NUM_WATCHED
            elif self._num_watched:
                self._num_watched -= 1
            self._spend(time.thread_time() - cpu_started)

    def _spend(self, cpu_s: float) -> None:
        """Take the time of a mask from the answer's budget; at its end the answer ends, alone."""
        added_s = TOKEN_BUDGET_S * len(self._new_tokens)
        self._budget_s = min(BUDGET_S, self._budget_s + added_s) - cpu_s
        if self._budget_s < 0 and self._error is None:
            self._error = self._too_costly(
                f"takes more than {TOKEN_BUDGET_S * 1e3:g} ms of computing for a token"
            )

    def _too_costly(self, reason: str) -> InvalidRequestError:
        return grammar_error(
            self._grammar,
            f"it {reason}, after {self.num_tokens} tokens of the answer; ambiguous rules, such as "
            "`e: e e`, cost more the longer the answer is",
        )

    def _consume(self, token_id: int) -> None:
        """Take a token in. The mask before it took longer, as it tries each token it allows."""
        if self._mask_s < QUICK_S:
            self._matcher.consume_token(token_id)
        else:
            self._consumer.consume(self._matcher, token_id)

    def _look_ahead(self, clock: Callable[[], float]) -> None:
        """Compute the next mask with a choice, and the forced tokens before it."""
        matcher = self._matcher
        while True:
            started = clock()
            matcher.unsafe_compute_mask_ptr(self._address, self._num_bytes)
            self._mask_s = clock() - started
            if matcher.is_error():
                self._error = grammar_error(self._grammar, matcher.get_error())
                return
            num_words = np.count_nonzero(self._mask)
            if not num_words:
                num_tokens = self.num_tokens + len(self.forced)
                self._error = grammar_error(
                    self._grammar, f"no token can follow after {num_tokens} of the answer"
                )
            if num_words != 1 or len(self.forced) == MAX_AHEAD:
                return
            word = int(self._words.argmax())
            bits = int(self._words[word])
            if bits & (bits - 1):
                return
            self.forced.append(32 * word + bits.bit_length() - 1)
            if matcher.is_stopped():  # that was the end of text
                return
            self._consume(self.forced[-1])


def _mask_of(token_id: int, like: "npt.NDArray[np.int32]") -> "npt.NDArray[np.int32]":
    """Return the mask that allows `token_id` alone."""
    mask = np.zeros_like(like)
    mask.view(np.uint32)[token_id // 32] = 1 << token_id % 32
    return mask
