"""The whole engine with a model: requests of every kind, however the work was scheduled."""

import random

import pytest

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.sequence import Sequence
from tandem.models.paths import BUNDLED_MODEL
from tandem.runtime.wire.messages import SamplingParams, StopConditions, TokenLogprobs
from tests.engine.step_doubles import CallAgain

REQUESTS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=0.9, top_p=0.9, seed=11),
    SamplingParams(temperature=1.1, top_k=40, seed=12, logprobs=1),
    SamplingParams(temperature=0.0, frequency_penalty=1.2),
    SamplingParams(temperature=0.7, presence_penalty=1.5, seed=13, logprobs=2),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias={40: 3.0}),
    SamplingParams(temperature=0.8, min_p=0.05, repetition_penalty=0.9, seed=14),
]

Answer = tuple[list[int], list[TokenLogprobs], str, int | None]


def answers(engine: Engine, stop_token_ids: list[int]) -> list[Answer]:
    """Text, log-probabilities, reason and stop token of every one of REQUESTS."""
    rng = random.Random(3)
    found: dict[str, Answer] = {}
    for index, sampling in enumerate(REQUESTS):
        prompt = [rng.randrange(3, 2000) for _ in range(rng.randint(1, 40))]
        stop = StopConditions(
            max_tokens=20 + index, min_tokens=4 * (index % 3), stop_token_ids=stop_token_ids
        )
        engine.add(Sequence(f"r{index}", prompt, len(prompt), sampling, stop))
        found[f"r{index}"] = ([], [], "", None)
    while engine.has_work:
        for output in engine.step():
            token_ids, logprobs, _, _ = found[output.request_id]
            token_ids += output.token_ids
            logprobs += output.logprobs or []
            reason = output.finish_reason or ""
            found[output.request_id] = (token_ids, logprobs, reason, output.stop_token_id)
        engine.check_invariants()
    return list(found.values())


def test_requests_of_every_kind_are_answered_alike_on_time_ahead_and_padded() -> None:
    """By the bundled model, with few blocks; one token in 48 stops a text before its length."""
    stop_token_ids = list(range(5, 2048, 48))
    ways: list[list[Answer]] = []
    for overlap in (False, True):
        for recorder in (None, CallAgain()):
            config = EngineConfig(
                model=str(BUNDLED_MODEL),
                device="cpu",
                block_size=8,
                threads=1,
                num_blocks=16,
                max_num_seqs=7,
                prefill_chunk_tokens=8,
                overlap=overlap,
            )
            engine = Engine(config, ModelRunner(config, recorder))
            ways.append(answers(engine, stop_token_ids))
            assert recorder is None or recorder.num_replays > 10
            assert engine.load().num_preemptions > 0
    first = ways[0]
    assert {reason for _, _, reason, _ in first} == {"stop", "length"}
    for way in ways[1:]:
        for ours, theirs in zip(way, first, strict=True):
            assert (ours[0], *ours[2:]) == (theirs[0], *theirs[2:])
            assert_close(ours[1], theirs[1])


def assert_close(ours: list[TokenLogprobs], theirs: list[TokenLogprobs]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert dict(mine.top) == pytest.approx(dict(other.top), abs=1e-4)
