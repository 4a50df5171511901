"""Grammars that were refused, for a while, and callers whose grammars keep breaking their trial."""

import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from tandem.runtime.errors import InvalidRequestError, OverloadedError
from tandem.runtime.wire.messages import Grammar

REMEMBERED_S = 60.0  # a verdict may be of a busy moment
MAX_REMEMBERED = 1024  # grammars, and callers
MAX_COSTLY = 3  # grammars of a caller within REMEMBERED_S


class Refusals:
    """Grammars that failed a short while ago: refused at once, without another trial."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._faults: OrderedDict[bytes, tuple[float, str, str]] = OrderedDict()  # by grammar
        self._costly: OrderedDict[str, deque[float]] = OrderedDict()  # times, by caller

    def check(self, grammar: Grammar, caller: str) -> None:
        """Raise InvalidRequestError for a grammar that was refused.

        Raises OverloadedError for a caller of whom too many have cost a whole trial. Callers
        without a name are not told apart, and none of them is refused for the others.
        """
        now = self._clock()
        until, fault, field = self._faults.get(_digest(grammar), (0.0, "", ""))
        if now < until:
            raise InvalidRequestError(fault, param=field)
        costly = self._costly.get(caller)
        if costly is not None and len(costly) == MAX_COSTLY and now < costly[0] + REMEMBERED_S:
            raise OverloadedError(
                f"{MAX_COSTLY} grammars of this key took too much to compile in the last "
                f"{REMEMBERED_S:g} s; new ones wait",
                retry_after_s=costly[0] + REMEMBERED_S - now,
            )

    def note(
        self, grammar: Grammar, caller: str, error: InvalidRequestError, *, is_costly: bool
    ) -> None:
        """Remember a refusal. A costly one took a whole trial, or broke its process."""
        now = self._clock()
        self._faults[_digest(grammar)] = now + REMEMBERED_S, error.message, error.param or ""
        if len(self._faults) > MAX_REMEMBERED:
            self._faults.popitem(last=False)
        if is_costly and caller:
            self._costly.setdefault(caller, deque(maxlen=MAX_COSTLY)).append(now)
            self._costly.move_to_end(caller)
            if len(self._costly) > MAX_REMEMBERED:
                self._costly.popitem(last=False)


def _digest(grammar: Grammar) -> bytes:
    text = f"{grammar.kind} {grammar.source}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
