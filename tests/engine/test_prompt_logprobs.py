"""Log probabilities of prompts, against transformers, however the prompt was computed."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.outputs import SequenceOutput
from tandem.engine.schedule.sequence import Sequence
from tandem.models.random_model import write_random_model
from tandem.runtime.wire.messages import SamplingParams, StopConditions
from tandem.runtime.wire.prompt_logprobs import PromptLogprobs
from tests.accuracy import Judged, judged_logits

NUM_TOP = 3
VOCAB_SIZE = 320
LENGTHS = (1, 2, 9, 40, 57)
SCORED = SamplingParams(temperature=0, logprobs=NUM_TOP, prompt_logprobs=True)


def prompts() -> dict[str, list[int]]:
    draw = random.Random(3)
    return {str(n): [draw.randrange(VOCAB_SIZE) for _ in range(n)] for n in LENGTHS}


@dataclass(frozen=True)
class Case:
    model: Path
    expected: dict[str, Judged]  # [num_tokens, vocab_size] log probabilities


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    model = write_random_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    expected = {
        name: judged_logits(reference, ids).each(lambda logits: logits.log_softmax(-1))
        for name, ids in prompts().items()
    }
    yield Case(model, expected)


def make_engine(case: Case, **options: Any) -> Engine:
    defaults = {"device": "cpu", "block_size": 8, "threads": 1, "num_blocks": 200}
    config = EngineConfig(model=str(case.model), **(defaults | options))
    return Engine(config, ModelRunner(config))


def sequence(name: str, sampling: SamplingParams = SCORED, max_tokens: int = 4) -> Sequence:
    ids = prompts()[name]
    stop = StopConditions(max_tokens=max_tokens, ignore_eos=True)
    return Sequence(name, list(ids), len(ids), sampling, stop)


def run(engine: Engine) -> list[SequenceOutput]:
    outputs: list[SequenceOutput] = []
    while engine.has_work:
        outputs += engine.step()
    engine.check_invariants()
    assert all(output.error is None for output in outputs)
    return outputs


def check(case: Case, name: str, found: PromptLogprobs | None) -> None:
    expected, ids = case.expected[name], prompts()[name]
    assert found is not None and found.are_of(len(ids) - 1) and found.num_top == NUM_TOP
    for row, (logprob, top) in enumerate(found.rows(0, len(found))):
        best = expected.exact[row].topk(NUM_TOP).values
        for token_id, value in ((ids[row + 1], logprob), *top):
            expected.assert_near(torch.tensor(value), (row, token_id))
        assert expected.exact[row, [token_id for token_id, _ in top]].tolist() == pytest.approx(
            best.tolist(), abs=2 * expected.allowed
        )


def scored(engine: Engine) -> dict[str, PromptLogprobs]:
    """Score all prompts at once. Each comes once, with the first token."""
    found: dict[str, PromptLogprobs] = {}
    for name in prompts():
        engine.add(sequence(name))
    begun = set()
    for output in run(engine):
        is_first = output.request_id not in begun
        assert (output.prompt_logprobs is not None) == is_first
        if output.prompt_logprobs is not None:
            assert len(output.token_ids) == 1
            begun.add(output.request_id)
            found[output.request_id] = output.prompt_logprobs
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 24, "prefill_chunk_tokens": 5, "max_num_seqs": 2},
        {"max_num_batched_tokens": 4, "overlap": True, "max_num_seqs": 3},
        {"num_blocks": 9, "overlap": True, "prefill_chunk_tokens": 6},
        {"kernels": "torch", "prefill_chunk_tokens": 7},
    ],
    ids=["whole", "chunked", "single tokens", "short of blocks", "reference kernels"],
)
def test_they_are_those_of_transformers(case: Case, options: dict[str, Any]) -> None:
    found = scored(make_engine(case, **options))
    assert found.keys() == prompts().keys()
    for name, logprobs in found.items():
        check(case, name, logprobs)


def test_a_cached_prompt_is_scored_whole_and_stays_cached(case: Case) -> None:
    engine = make_engine(case)
    plain = sequence("57", SamplingParams(temperature=0))
    engine.add(plain)
    run(engine)
    assert engine.prefix_hit(sequence("57", SamplingParams(temperature=0))) == 56
    assert engine.prefix_hit(sequence("57")) == 0
    first, *_ = [scored(engine)["57"] for _ in range(2)]
    check(case, "57", first)
    assert engine.prefix_hit(sequence("57", SamplingParams(temperature=0))) == 56


def test_a_prompt_that_is_preempted_halfway_is_scored_from_its_start(case: Case) -> None:
    engine = make_engine(case, num_blocks=11, prefill_chunk_tokens=3)
    growing = sequence("9", SamplingParams(temperature=0), max_tokens=40)
    engine.add(growing)
    outputs = engine.step()
    engine.add(sequence("57"))
    outputs += run(engine)
    assert engine.load().num_preemptions > 0
    [found] = [each.prompt_logprobs for each in outputs if each.prompt_logprobs is not None]
    check(case, "57", found)


def test_without_tokens_to_generate_the_prompt_is_all(case: Case) -> None:
    engine = make_engine(case, max_model_len=57)
    engine.add(sequence("57", max_tokens=0))
    [output] = run(engine)
    assert (output.token_ids, output.finish_reason, output.stop_token_id) == ([], "length", None)
    assert output.logprobs is None
    check(case, "57", output.prompt_logprobs)


def test_the_token_that_ends_the_answer_has_its_log_probability(case: Case) -> None:
    ids = prompts()["9"]
    engine = make_engine(case)
    engine.add(sequence("9", max_tokens=1))
    [first] = run(engine)
    stop = StopConditions(max_tokens=1, stop_token_ids=first.token_ids)
    engine.add(Sequence("again", list(ids), len(ids), SCORED, stop))
    [output] = run(engine)
    assert (output.token_ids, output.stop_token_id) == ([], first.token_ids[0])
    assert output.logprobs == first.logprobs and output.prompt_logprobs == first.prompt_logprobs
