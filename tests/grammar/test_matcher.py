"""The thread on which an answer's masks are computed."""

import ctypes
import threading
import time
from collections.abc import Iterator

import pytest

from tandem.grammar.matcher import NUM_WATCHED, GrammarMatcher, MaskThreads
from tandem.runtime.messages import Grammar

LONG_S = 0.3


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
