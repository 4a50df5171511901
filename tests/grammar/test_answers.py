"""Answers of random weights: each follows its grammar, whatever happens to it on the way."""

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.outputs import SequenceOutput
from tandem.engine.schedule.sequence import Sequence
from tandem.engine.step.outcome import SampledToken
from tandem.grammar import matcher
from tandem.grammar.compiler import GrammarCompiler
from tandem.models.random_model import write_random_model
from tandem.runtime.wire.messages import SamplingParams, StopConditions, TokenLogprobs
from tests.grammar.answers import CASES

pytestmark = pytest.mark.asyncio(loop_scope="module")
VOCAB_SIZE = 512
MAX_TOKENS = 250


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_random_model(folder, vocab_size=VOCAB_SIZE, hidden_size=32, num_layers=1)


def make_engine(model: Path, **changes: object) -> Engine:
    fields = {"device": "cpu", "threads": 1, "block_size": 8, "num_blocks": 2000}
    config = EngineConfig.model_validate({"model": str(model), **fields, **changes})
    return Engine(config, ModelRunner(config))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def compiler(model: Path) -> AsyncIterator[GrammarCompiler]:
    eos_token_ids = make_engine(model).runner.model_config.eos_token_ids
    compiler = GrammarCompiler.of_model(model, VOCAB_SIZE, eos_token_ids)
    assert compiler is not None
    yield compiler
    await compiler.close()


class Crowd:
    """Sequences under every kind of grammar in one engine, with some that are free."""

    def __init__(self, model: Path, compiler: GrammarCompiler, engine: Engine) -> None:
        self.engine = engine
        self.compiler = compiler
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.answers: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.reasons: dict[str, str] = {}
        self.num_draws = 0

    async def add(self, name: str, kind: str, seed: int, answer: list[int]) -> None:
        """Add a sequence that goes on after `answer`; its prompt and its draws are the seed's."""
        self.engine.add(await self.sequence(name, kind, seed, answer))

    async def sequence(
        self, name: str, kind: str, seed: int, answer: list[int], *, prefill_only: bool = False
    ) -> Sequence:
        draw = random.Random(seed)
        prompt = [draw.randrange(256) for _ in range(draw.randrange(1, 40))]
        sampling = SamplingParams(
            temperature=draw.choice([0.0, 0.7, 1.5]),
            seed=seed,
            top_k=draw.choice([0, 40]),
            frequency_penalty=draw.choice([0.0, 0.5]),
            logprobs=draw.choice([None, 3]),
        )
        stop = StopConditions(
            max_tokens=MAX_TOKENS if kind in CASES else 60,
            min_tokens=draw.choice([0, 10]),
            ignore_eos=draw.choice([False, True]) and kind in CASES,
        )
        tokens = prompt + answer
        seq = Sequence(name, tokens, len(prompt), sampling, stop, prefill_only=prefill_only)
        if kind in CASES:
            seq.matcher = await self.compiler.compile(CASES[kind].grammar, answer)
        self.answers[name] = list(answer)
        self.logprobs[name] = []
        return seq

    def run(self) -> None:
        while self.engine.has_work:
            for output in self.engine.step():
                self.take(output)

    def take(self, output: SequenceOutput) -> None:
        assert output.error is None, output.error
        self.num_draws += 1
        self.answers[output.request_id] += output.token_ids
        self.logprobs[output.request_id] += output.logprobs or []
        if output.finish_reason is not None:
            self.reasons[output.request_id] = output.finish_reason

    def text(self, name: str) -> str:
        found: str = self.tokenizer.decode(self.answers[name])
        return found

    def check(self, name: str, kind: str) -> None:
        """Free text inside of a structural tag may go on to the limit."""
        if self.reasons[name] == "length" and kind == "structural_tag":
            return
        text = self.text(name)
        assert self.reasons[name] == "stop", f"{name}: {text!r} has no end"
        assert CASES[kind].is_valid(text), f"{name}: {text!r}"


KINDS = [*CASES, "free"]


async def valid_answers(crowd: Crowd, num_each: int) -> None:
    for index in range(num_each):
        for kind in KINDS:
            await crowd.add(f"{kind} {index}", kind, index, [])
    crowd.run()
    crowd.engine.check_invariants()
    assert crowd.engine.block_pool.num_held == 0
    for index in range(num_each):
        for kind in CASES:
            crowd.check(f"{kind} {index}", kind)


WAYS = {
    "in turn": {"max_num_seqs": 48},
    "overlap": {"max_num_seqs": 24, "overlap": True},
    "preempted": {"max_num_seqs": 24, "num_blocks": 80, "overlap": True},
    "chunked": {"max_num_seqs": 8, "max_num_batched_tokens": 16},
}


async def test_answers_of_preempted_sequences_follow_their_grammars(
    model: Path, compiler: GrammarCompiler
) -> None:
    crowd = Crowd(model, compiler, make_engine(model, **WAYS["preempted"]))
    await valid_answers(crowd, 4)
    assert crowd.engine.scheduler.num_preemptions > 0


async def test_an_answer_cut_anywhere_follows_its_grammar_elsewhere(
    model: Path, compiler: GrammarCompiler
) -> None:
    """The rest is that of the uncut answer."""
    whole = Crowd(model, compiler, make_engine(model))
    for kind in CASES:
        await whole.add(kind, kind, 3, [])
    whole.run()
    rest = Crowd(model, compiler, make_engine(model, enable_prefix_cache=False))
    cuts = {}
    for kind in CASES:
        tokens = whole.answers[kind]
        for cut in random.Random(4).sample(range(1, len(tokens)), min(3, len(tokens) - 1)):
            cuts[f"{kind} {cut}"] = kind
            await rest.add(f"{kind} {cut}", kind, 3, tokens[:cut])
    rest.run()
    assert len(cuts) > 10
    for name, kind in cuts.items():
        assert rest.answers[name] == whole.answers[kind], name
        rest.check(name, kind)


async def test_a_step_that_failed_is_computed_again_under_its_grammars(
    model: Path, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd = Crowd(model, compiler, make_engine(model, overlap=True))
    launch, num_launches = crowd.engine.runner.launch, 0

    def failing(*args: object) -> object:
        nonlocal num_launches
        num_launches += 1
        if num_launches % 7 == 3 and len(args[0]) > 1:  # type: ignore[arg-type]
            raise RuntimeError("a step that fails when it is not alone")
        return launch(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(crowd.engine.runner, "launch", failing)
    await valid_answers(crowd, 1)
    assert num_launches > 50


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_by_one(model: Path, compiler: GrammarCompiler) -> Crowd:
    """Answers of every kind without forced tokens."""
    crowd = Crowd(model, compiler, make_engine(model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matcher, "MAX_AHEAD", 0)
        for index in range(2):
            for kind in CASES:
                await crowd.add(f"{kind} {index}", kind, index, [])
        crowd.run()
    for name in crowd.answers:
        crowd.check(name, name.split()[0])
    return crowd


def check_same(crowd: Crowd, one_by_one: Crowd) -> None:
    assert crowd.answers == one_by_one.answers and crowd.reasons == one_by_one.reasons
    for name, logprobs in one_by_one.logprobs.items():
        for mine, theirs in zip(crowd.logprobs[name], logprobs, strict=True):
            assert [token_id for token_id, _ in mine.top] == [each for each, _ in theirs.top]
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert len(mine.top) > 1 or mine == theirs


# The others overlap and compute in turn as well.
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, id=name, marks=pytest.mark.slow if name in ("in turn", "overlap") else ())
        for name, way in WAYS.items()
    ],
)
async def test_answers_with_forced_tokens_are_those_of_one_draw_for_each(
    model: Path, compiler: GrammarCompiler, one_by_one: Crowd, way: dict[str, object]
) -> None:
    crowd = Crowd(model, compiler, make_engine(model, **way))
    for name in one_by_one.answers:
        kind, index = name.split()
        await crowd.add(name, kind, int(index), [])
    crowd.run()
    crowd.engine.check_invariants()
    check_same(crowd, one_by_one)
    assert crowd.num_draws < one_by_one.num_draws


@pytest.mark.slow
async def test_forced_tokens_follow_a_first_token_of_a_prefill_worker(
    model: Path, compiler: GrammarCompiler, one_by_one: Crowd
) -> None:
    """The prefill worker hands over one token, even where its grammar forces more."""
    prefill = Crowd(model, compiler, make_engine(model))
    decode = Crowd(model, compiler, make_engine(model))
    for name in one_by_one.answers:
        kind, index = name.split()
        prefill.engine.add(await prefill.sequence(name, kind, int(index), [], prefill_only=True))
        assert decode.engine.reserve(await decode.sequence(name, kind, int(index), []))
    prefill.run()
    for name, [token_id] in prefill.answers.items():
        logprobs = (prefill.logprobs[name] or [None])[0]
        first = SampledToken(token_id, logprobs)
        output = decode.engine.prefill_locally(name, quarantined=False, first=first)
        assert output is not None
        decode.take(output)
    decode.run()
    check_same(decode, one_by_one)


@pytest.mark.slow
async def test_hundreds_of_answers_in_one_pool_follow_their_grammars(
    model: Path, compiler: GrammarCompiler
) -> None:
    engine = make_engine(model, max_num_seqs=64, num_blocks=4000, overlap=True)
    for start in range(0, 100, 50):
        crowd = Crowd(model, compiler, engine)
        for index in range(start, start + 50):
            for kind in CASES:
                await crowd.add(f"{kind} {index}", kind, index, [])
        crowd.run()
        for index in range(start, start + 50):
            for kind in CASES:
                crowd.check(f"{kind} {index}", kind)
