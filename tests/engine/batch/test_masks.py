"""Sequences under a grammar in an engine: what their masks do to a step, and to the others."""

from pathlib import Path
from threading import Event

import numpy as np
import numpy.typing as npt
import pytest

from tandem.engine.batch import masks
from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.sequence import Sequence
from tandem.models.random_model import write_random_model
from tandem.runtime.errors import InvalidRequestError, TandemError
from tandem.runtime.wire.messages import SamplingParams, StopConditions

VOCAB_SIZE = 320
EOS = 258  # <|im_end|>, of the model's generation_config.json
OTHER_EOS = 256


class ListedTokens:
    """A matcher that allows the tokens of a list at each place of the answer."""

    def __init__(self, *allowed: set[int]) -> None:
        self.allowed = allowed
        self.num_tokens = 0
        self.taken: list[int] = []
        self.errors: dict[int, TandemError] = {}
        self.slow_places: set[int] = set()
        self.go_on = Event()

    def begin(self, new_tokens: list[int]) -> None:
        self.taken += new_tokens
        self.num_tokens += len(new_tokens)

    def wait(self, timeout_s: float | None) -> bool:
        return self.num_tokens not in self.slow_places or self.go_on.is_set()

    @property
    def forced(self) -> list[int]:
        forced: list[int] = []
        for place, allowed in list(enumerate(self.allowed))[self.num_tokens :]:
            if len(allowed) > 1 or place in self.errors or place in self.slow_places:
                break
            forced += allowed
        return forced

    def mask(self) -> "npt.NDArray[np.int32]":
        if (error := self.errors.get(self.num_tokens)) is not None:
            raise error
        bits = [0] * (VOCAB_SIZE // 32)
        for token_id in self.allowed[min(self.num_tokens, len(self.allowed) - 1)]:
            bits[token_id // 32] |= 1 << token_id % 32
        return np.array(bits, np.uint32).view(np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_random_model(folder, vocab_size=VOCAB_SIZE, hidden_size=32)


@pytest.fixture(params=[False, True], ids=["in turn", "overlap"])
def engine(model: Path, request: pytest.FixtureRequest) -> Engine:
    config = EngineConfig(
        model=str(model),
        device="cpu",
        block_size=4,
        num_blocks=64,
        threads=1,
        overlap=request.param,
        max_num_batched_tokens=16,
    )
    return Engine(config, ModelRunner(config))


class Answers:
    """The answers of an engine's sequences."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.errors: dict[str, TandemError] = {}
        self.tops: dict[str, list[list[tuple[int, float]]]] = {}
        self.num_draws: dict[str, int] = {}

    def add(
        self,
        name: str,
        matcher: ListedTokens | None = None,
        prompt: int = 3,
        sampling: SamplingParams | None = None,
        **stop: object,
    ) -> None:
        tokens = [5 + (7 * i + len(name)) % 200 for i in range(prompt)]
        params = sampling or SamplingParams(temperature=0)
        seq = Sequence(name, tokens, prompt, params, StopConditions(**{"max_tokens": 8, **stop}))  # type: ignore[arg-type]
        seq.matcher = matcher
        self.engine.add(seq)
        self.tokens[name] = []

    def step(self) -> None:
        for output in self.engine.step():
            name = output.request_id
            self.tokens[name] += output.token_ids
            self.num_draws[name] = self.num_draws.get(name, 0) + 1
            self.tops.setdefault(name, []).extend(each.top for each in output.logprobs or [])
            if output.finish_reason is not None:
                self.reasons[name] = output.finish_reason
            if output.error is not None:
                self.errors[name] = output.error
        self.engine.check_invariants()

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()
        assert self.engine.block_pool.num_held == 0


@pytest.fixture
def answers(engine: Engine) -> Answers:
    return Answers(engine)


def test_an_answer_has_only_tokens_that_its_masks_allow_and_ends_with_them(
    answers: Answers,
) -> None:
    alone = Answers(answers.engine)
    alone.add("free")
    alone.finish()
    matcher = ListedTokens({31}, {40, 41}, {32, 63}, {EOS})
    answers.add("bound", matcher, sampling=SamplingParams(temperature=1.5, seed=3))
    answers.add("free")
    answers.finish()
    first, second, third = answers.tokens["bound"]
    assert first == 31 and second in (40, 41) and third in (32, 63)
    assert answers.reasons["bound"] == "stop" and matcher.taken == answers.tokens["bound"]
    assert answers.tokens["free"] == alone.tokens["free"]


def test_a_mask_that_takes_long_puts_its_own_row_off_and_no_other(answers: Answers) -> None:
    quick, slow = ListedTokens({1}, {2}), ListedTokens({3}, {4}, {5}, {EOS})
    slow.slow_places = {1}
    answers.add("slow", slow)
    answers.add("quick", quick)
    answers.add("free", ignore_eos=True)
    for _ in range(40):
        answers.step()
    assert answers.tokens["slow"] == [3]
    assert len(answers.tokens["quick"]) == len(answers.tokens["free"]) == 8
    slow.go_on.set()
    answers.finish()
    assert answers.tokens["slow"] == [3, 4, 5] and answers.reasons["slow"] == "stop"


def test_a_row_that_was_put_off_gives_the_answer_of_one_that_was_not(answers: Answers) -> None:
    """Also where its prompt has just ended, and at the end of a block."""
    params = SamplingParams(temperature=1.0, seed=11)
    every = set(range(200))
    for prompt in (1, 4, 7, 40):
        for name, place in (("plain", None), ("late", 0), ("later", 1)):
            matcher = ListedTokens(every)
            if place is not None:
                matcher.slow_places = {place}
            answers.add(f"{name} {prompt}"[-9:], matcher, prompt, params)
            if place is not None:
                for _ in range(6):
                    answers.step()
                matcher.go_on.set()
            answers.finish()
        texts = [tokens for name, tokens in answers.tokens.items() if name.endswith(f" {prompt}")]
        assert len(texts) == 3 and len(texts[0]) == 8


@pytest.mark.parametrize("place", [0, 2])
def test_a_row_that_no_token_can_follow_ends_alone(answers: Answers, place: int) -> None:
    matcher = ListedTokens({7})
    matcher.errors[place] = InvalidRequestError("the regex: nothing follows", param="grammar")
    answers.add("lost", matcher)
    answers.add("free", ignore_eos=True)
    answers.finish()
    assert answers.tokens["lost"] == [7] * place and answers.reasons["lost"] == "error"
    assert answers.errors["lost"].param == "grammar"
    assert len(answers.tokens["free"]) == 8 and "free" not in answers.errors


def test_the_end_of_text_is_held_back_while_another_token_is_allowed(answers: Answers) -> None:
    likes_end = SamplingParams(temperature=0, logit_bias={EOS: 1000.0, OTHER_EOS: 1000.0})
    for name, stop in (("min", {"min_tokens": 3}), ("ignore", {"ignore_eos": True})):
        matcher = ListedTokens({9, EOS}, {9, EOS}, {9, OTHER_EOS}, {10, 9}, {EOS, OTHER_EOS})
        answers.add(name, matcher, sampling=likes_end, **stop)
    matcher = ListedTokens({9, EOS})
    answers.add("at once", matcher, sampling=likes_end)
    matcher = ListedTokens({9}, {EOS})
    answers.add("too short", matcher, min_tokens=5)
    answers.finish()
    assert len(answers.tokens["min"]) == len(answers.tokens["ignore"]) == 4
    assert answers.tokens["at once"] == [] and answers.tokens["too short"] == [9]
    assert set(answers.reasons.values()) == {"stop"}


def test_a_stop_token_is_held_back_until_min_tokens(answers: Answers) -> None:
    stop = {"min_tokens": 2, "stop_token_ids": [9], "max_tokens": 5}
    bias = SamplingParams(temperature=0, logit_bias={9: 1000.0})
    answers.add("stopped", ListedTokens({9, 8}), sampling=bias, **stop)
    answers.finish()
    assert answers.tokens["stopped"] == [8, 8] and answers.reasons["stopped"] == "stop"


def test_log_probabilities_are_of_the_allowed_tokens(answers: Answers) -> None:
    params = SamplingParams(temperature=0, logprobs=5)
    answers.add("bound", ListedTokens({3, 4}, {6}), sampling=params, max_tokens=2)
    answers.finish()
    pair, only = answers.tops["bound"]
    assert {token_id for token_id, _ in pair} == {3, 4}
    assert sum(2.718281828459045**value for _, value in pair) == pytest.approx(1, abs=1e-5)
    assert only == [(6, 0.0)]


def test_forced_tokens_come_with_the_draw_before_them(answers: Answers) -> None:
    """More of them than batch rows, than a block, and than a step takes."""
    run = [{40 + i} for i in range(30)]
    answers.add("bound", ListedTokens({3, 4}, *run, {5, 6}, {EOS}), max_tokens=60)
    answers.add("free", prompt=9, max_tokens=60, ignore_eos=True)
    answers.finish()
    first, *forced, last = answers.tokens["bound"]
    assert first in (3, 4) and last in (5, 6) and forced == list(range(40, 70))
    assert answers.num_draws["bound"] == 4 and answers.reasons["bound"] == "stop"
    assert len(answers.tokens["free"]) == answers.num_draws["free"] == 60


@pytest.mark.parametrize(
    ("stop", "num_tokens", "reason"),
    [
        ({"max_tokens": 4}, 4, "length"),
        ({"stop_token_ids": [43]}, 3, "stop"),
        ({"stop_token_ids": [43], "min_tokens": 9}, 3, "stop"),
        ({"max_tokens": 20, "min_tokens": 9, "ignore_eos": True}, 6, "stop"),
    ],
)
def test_forced_tokens_end_where_drawn_ones_would(
    answers: Answers, stop: dict[str, object], num_tokens: int, reason: str
) -> None:
    params = SamplingParams(temperature=0, logprobs=2)
    matcher = ListedTokens(*({40 + i} for i in range(6)), {EOS})
    answers.add("bound", matcher, sampling=params, **stop)
    answers.finish()
    assert answers.tokens["bound"] == list(range(40, 40 + num_tokens))
    assert answers.reasons["bound"] == reason
    assert answers.tops["bound"] == [[(token_id, 0.0)] for token_id in answers.tokens["bound"]]


def test_penalties_count_forced_tokens(answers: Answers) -> None:
    params = SamplingParams(temperature=0, frequency_penalty=1000.0)
    answers.add("bound", ListedTokens({3}, {4}, {3, 4, 5}), sampling=params, max_tokens=3)
    answers.finish()
    assert answers.tokens["bound"] == [3, 4, 5] and answers.num_draws["bound"] == 2


def test_penalties_count_under_a_grammar(answers: Answers) -> None:
    params = SamplingParams(temperature=0, frequency_penalty=1000.0)
    answers.add("bound", ListedTokens({3, 4, 5}), sampling=params, max_tokens=6)
    answers.finish()
    assert sorted(answers.tokens["bound"]) == [3, 3, 4, 4, 5, 5]


def test_a_mask_is_waited_for_where_nothing_else_would_be_computed(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine thread still takes commands after a while."""
    seen: list[float | None] = []
    matcher = ListedTokens({3}, {EOS})

    def wait(timeout_s: float | None) -> bool:
        seen.append(timeout_s)
        return len(seen) > 3

    monkeypatch.setattr(matcher, "wait", wait)
    monkeypatch.setattr(masks, "ALONE_WAIT_S", 100.0)
    answers.add("alone", matcher)
    answers.finish()
    assert answers.tokens["alone"] == [3] and answers.reasons["alone"] == "stop"
    assert all(s is not None and 90 < s <= 100 for s in seen)
