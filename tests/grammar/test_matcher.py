"""The thread on which an answer's masks are computed, Python's lock meanwhile, and their budget."""

import ctypes
import threading
import time
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher

from tandem.grammar.compiled import load_tokenizer
from tandem.grammar.consuming import Consumer
from tandem.grammar.matcher import NUM_WATCHED, GrammarMatcher, MaskThreads
from tandem.models.paths import BUNDLED_MODEL
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.messages import Grammar
from tests.grammar.conftest import EOS, TOKENIZER, VOCAB_SIZE

LONG_S = 0.3
AMBIGUOUS = 'start: e\ne: e e | "a"'
LETTER = TOKENIZER.token_to_id("a")
LL_TOKENIZER = load_tokenizer(BUNDLED_MODEL / "tokenizer.json", VOCAB_SIZE, (EOS,))


class NoLock:
    """A consumer that notes its tokens."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def consume(self, matcher: LLMatcher, token_id: int) -> bool:
        self.taken.append(token_id)
        return True


class AnyToken:
    """The part of an LLMatcher that masks take; it allows two tokens at any place."""

    def __init__(self) -> None:
        self.seconds = 0.0  # of the next mask
        self.on_main: list[bool] = []
        self.taken: list[int] = []  # with Python's lock

    def consume_token(self, token_id: int) -> bool:
        assert token_id in (0, 1)
        self.taken.append(token_id)
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
    rules = Grammar("regex", ".")
    matcher = GrammarMatcher(tokens, rules, 32, threads, NoLock())  # type: ignore[arg-type]
    matcher.begin([])
    for seconds in (0.0, 0.0, LONG_S, *[0.0] * (NUM_WATCHED + 1)):
        assert matcher.wait(60.0)
        assert matcher.mask().tolist() == [3]
        tokens.seconds = seconds
        matcher.begin([1])
    assert matcher.wait(60.0)
    first, quick, slow, rest = [False], [True] * 2, [True], [False] * NUM_WATCHED
    assert tokens.on_main == [*first, *quick, *slow, *rest, True]


def ambiguous() -> LLMatcher:
    return LLMatcher(LL_TOKENIZER, LLMatcher.grammar_from_lark(AMBIGUOUS), log_level=0)


def test_another_thread_runs_while_a_costly_token_is_taken() -> None:
    """Where the lock is held there is no moment of that thread within a call but at its edges."""
    matcher, consumer, ended = ambiguous(), Consumer(LL_TOKENIZER), threading.Event()
    moments: list[float] = []

    def note_moments() -> None:
        while not ended.is_set():
            moments.append(time.perf_counter())
            time.sleep(1e-4)

    thread = threading.Thread(target=note_moments)
    thread.start()
    try:
        for _ in range(600):
            started = time.perf_counter()
            assert consumer.consume(matcher, LETTER)
            took_s = time.perf_counter() - started
            if took_s < 2e-3:
                continue
            within = [started + took_s / 4 < each < started + took_s * 3 / 4 for each in moments]
            moments.clear()
            if any(within):
                return
    finally:
        ended.set()
        thread.join()
    pytest.fail("no moment of another thread")


def test_a_token_after_a_mask_that_took_long_is_taken_without_the_lock(
    threads: MaskThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.grammar.matcher.QUICK_S", LONG_S / 2)
    tokens, consumer = AnyToken(), NoLock()
    rules = Grammar("regex", ".")
    matcher = GrammarMatcher(tokens, rules, 32, threads, consumer)  # type: ignore[arg-type]
    for seconds, token_ids in ((0.0, []), (LONG_S, [0]), (0.0, [1]), (0.0, [0])):
        tokens.seconds = seconds
        matcher.begin(token_ids)
        assert matcher.wait(60.0)
    assert (tokens.taken, consumer.taken) == ([0, 0], [1])


def test_an_answer_whose_masks_cost_too_much_ends_alone_with_the_reason(
    threads: MaskThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.grammar.matcher.BUDGET_S", 0.02)
    monkeypatch.setattr("tandem.grammar.matcher.TOKEN_BUDGET_S", 0.0)
    consumer = Consumer(LL_TOKENIZER)

    def new(root: LLMatcher, kind: Grammar) -> GrammarMatcher:
        return GrammarMatcher(root, kind, VOCAB_SIZE, threads, consumer)

    costly = new(ambiguous(), Grammar("lark", AMBIGUOUS))
    plain = LLMatcher(LL_TOKENIZER, LLMatcher.grammar_from_regex("a*"), log_level=0)
    other = new(plain, Grammar("regex", "a*"))
    for matcher in (costly, other):
        matcher.begin([])

    def follow(matcher: GrammarMatcher) -> None:
        assert matcher.wait(60)
        matcher.mask()
        matcher.begin([LETTER])

    with pytest.raises(InvalidRequestError, match="it takes more than 0 ms") as e:
        for _ in range(2000):
            follow(costly)
    assert e.value.param == "grammar" and costly.num_tokens < 2000
    follow(other)
    assert other.wait(60) and other.mask().any()


def test_an_answer_that_takes_too_long_to_follow_again_is_refused(
    threads: MaskThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.grammar.matcher.REPLAY_S", 0.01)
    rules = Grammar("lark", AMBIGUOUS)
    matcher = GrammarMatcher(ambiguous(), rules, VOCAB_SIZE, threads, Consumer(LL_TOKENIZER))
    with pytest.raises(InvalidRequestError, match=r"takes over 0\.01 s to follow"):
        matcher.replay([LETTER] * 1000)


class Held(MaskThreads):
    """Threads that are busy until they are released."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[GrammarMatcher] = []

    def put(self, matcher: GrammarMatcher) -> None:
        self.held.append(matcher)

    def release(self) -> None:
        self.held.pop().compute()


@pytest.mark.parametrize("rules", ['start: "a" "a" | "b" "c" "d"', 'start: "a" "a" ("b" | "c")'])
def test_tokens_that_were_drawn_elsewhere_may_come_before_the_first_mask(rules: str) -> None:
    """The first token of a remote prompt, on a decode worker whose mask threads are busy."""
    threads, grammar = Held(), Grammar("lark", rules)

    def matcher() -> GrammarMatcher:
        root = LLMatcher(LL_TOKENIZER, rules)
        found = GrammarMatcher(root, grammar, VOCAB_SIZE, threads, Consumer(LL_TOKENIZER))
        found.begin([])
        return found

    late, usual = matcher(), matcher()
    threads.release()
    usual.begin([LETTER])
    if usual not in threads.held:
        assert usual.wait(None)
    while usual in threads.held:
        threads.release()
    threads.held = [late]
    late.begin([LETTER])
    late.begin([])
    assert not late.wait(0)
    threads.release()
    assert late.wait(0) and not threads.held
    assert late.num_tokens == usual.num_tokens == 1
    assert late.forced == usual.forced
    assert late.mask().tolist() == usual.mask().tolist()
