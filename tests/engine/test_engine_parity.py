"""The whole engine with a model: the text of transformers, however the work was scheduled."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.model_runner import ModelRunner
from tandem.engine.schedule.sequence import Sequence
from tandem.models.paths import BUNDLED_MODEL
from tandem.models.random_model import write_random_model
from tandem.runtime.messages import SamplingParams, StopConditions, TokenLogprobs
from tests.engine.models.parity import NUM_TOKENS, sequence
from tests.engine.models.tiny_models import LLAMA3_ROPE
from tests.engine.step_doubles import CallAgain

NUM_PROMPTS = 20
VOCAB_SIZE = 512

Texts = dict[str, list[int]]


def prompts() -> list[list[int]]:
    """Every second one begins as the one before it does."""
    rng = random.Random(7)
    result: list[list[int]] = []
    for i in range(NUM_PROMPTS):
        begin = result[-1][: rng.randint(8, 40)] if i % 2 else []
        result.append(begin + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 50))])
    return result


def make_engine(model: Path, recorder: CallAgain | None = None, **options: int | bool) -> Engine:
    config = EngineConfig(model=str(model), device="cpu", block_size=8, threads=1, **options)
    return Engine(config, ModelRunner(config, recorder))


def finish(engine: Engine, texts: Texts) -> None:
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            texts.setdefault(output.request_id, []).extend(output.token_ids)
    engine.check_invariants()
    assert engine.block_pool.num_held == 0


def generate(engine: Engine) -> Texts:
    texts: Texts = {}
    for index, prompt in enumerate(prompts()):
        engine.add(sequence(index, prompt))
    finish(engine, texts)
    return texts


def batched(model: Path) -> Texts:
    return generate(make_engine(model, num_blocks=1000))


def one_after_the_other(model: Path) -> Texts:
    return generate(make_engine(model, num_blocks=1000, max_num_seqs=1))


def chunked(model: Path) -> Texts:
    return generate(
        make_engine(
            model,
            num_blocks=1000,
            max_num_seqs=8,
            max_num_batched_tokens=24,
            prefill_chunk_tokens=5,
            enable_prefix_cache=False,
        )
    )


def with_prefix_hits(model: Path) -> Texts:
    engine = make_engine(model, num_blocks=1000)
    assert generate(engine) == generate(engine)
    texts = generate(engine)
    hits = [engine.prefix_hit(sequence(i, prompt)) for i, prompt in enumerate(prompts())]
    assert hits == [(len(prompt) - 1) // 8 * 8 for prompt in prompts()]
    return texts


def preempted(model: Path) -> Texts:
    engine = make_engine(model, num_blocks=36, prefill_chunk_tokens=16)
    texts = generate(engine)
    assert engine.load().num_preemptions > 3
    return texts


def overlapped(model: Path) -> Texts:
    return generate(make_engine(model, num_blocks=1000, overlap=True))


def preempted_and_overlapped(model: Path) -> Texts:
    engine = make_engine(model, num_blocks=36, prefill_chunk_tokens=16, overlap=True)
    texts = generate(engine)
    assert engine.load().num_preemptions > 3
    return texts


def padded_and_replayed(model: Path) -> Texts:
    return generate(make_engine(model, CallAgain(), num_blocks=1000, max_num_seqs=13))


def as_on_a_gpu(model: Path) -> Texts:
    engine = make_engine(
        model, CallAgain(), num_blocks=1000, max_num_seqs=11, prefill_chunk_tokens=9, overlap=True
    )
    return generate(engine)


@dataclass(frozen=True)
class Case:
    model: Path
    texts: Texts  # what transformers says


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    architecture: str = request.param
    model = write_random_model(
        tmp_path_factory.mktemp(architecture),
        architecture=architecture,
        vocab_size=VOCAB_SIZE,
        tie_word_embeddings=architecture == "qwen3",
        rope_scaling=LLAMA3_ROPE if architecture == "llama" else None,
    )
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    texts: Texts = {}
    with torch.inference_mode():
        for index, prompt in enumerate(prompts()):
            texts[f"r{index}"] = []
            token_ids, cache = torch.tensor([prompt]), None
            for _ in range(NUM_TOKENS):
                result = reference(token_ids, past_key_values=cache, use_cache=True)
                token_ids, cache = result.logits[:, -1:].argmax(-1), result.past_key_values
                texts[f"r{index}"].append(token_ids.item())
    return Case(model, texts)


@pytest.mark.parametrize(
    "way",
    [
        batched, one_after_the_other, chunked, with_prefix_hits, preempted, overlapped,
        preempted_and_overlapped, padded_and_replayed, as_on_a_gpu,
    ],
)  # fmt: skip
def test_the_text_is_that_of_transformers(case: Case, way: Callable[[Path], Texts]) -> None:
    assert way(case.model) == case.texts


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
    """By the bundled model; one token in 48 stops a text, so that many end before their length."""
    stop_token_ids = list(range(5, 2048, 48))
    ways: list[list[Answer]] = []
    for overlap in (False, True):
        for recorder in (None, CallAgain()):
            engine = make_engine(
                BUNDLED_MODEL,
                recorder,
                num_blocks=100,
                max_num_seqs=7,
                prefill_chunk_tokens=8,
                overlap=overlap,
            )
            ways.append(answers(engine, stop_token_ids))
            assert recorder is None or recorder.num_replays > 10
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
