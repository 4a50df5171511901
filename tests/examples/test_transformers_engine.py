"""examples/transformers_engine, run as its docstring says, beside Tandem's own engine."""

import aiohttp
import pytest
from tokenizers import Tokenizer

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.sequence import Sequence
from tandem.models.paths import BUNDLED_MODEL
from tandem.runtime.wire.messages import SamplingParams, StopConditions
from tests.examples.example_cluster import ExampleCluster

PROMPTS = ["Once upon a time", "The prefill worker", "One, two, three"]
NUM_TOKENS = 12


def greedy(prompts: list[list[int]]) -> list[list[int]]:
    """Return the answers of Tandem's own engine."""
    config = EngineConfig(
        model=str(BUNDLED_MODEL), device="cpu", dtype="float32", num_blocks=64, threads=1
    )
    engine = Engine(config, ModelRunner(config))
    answers: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        sampling, stop = SamplingParams(temperature=0.0), StopConditions(max_tokens=NUM_TOKENS)
        engine.add(Sequence(str(index), prompt, len(prompt), sampling, stop))
    while engine.has_work:
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    return [answers[str(index)] for index in range(len(prompts))]


@pytest.mark.slow
async def test_an_engine_around_transformers_gives_the_text_of_our_own(
    examples: ExampleCluster, http: aiohttp.ClientSession
) -> None:
    examples.start_frontend()
    engine = examples.start("transformers_engine", "transformers_engine.py", "--model-name", "mine")
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    own = greedy([tokenizer.encode(prompt).ids for prompt in PROMPTS])
    await examples.wait_for_models(http, "mine")
    for prompt, token_ids in zip(PROMPTS, own, strict=True):
        answer = await examples.complete(
            http, model="mine", prompt=prompt, max_tokens=NUM_TOKENS, temperature=0
        )
        assert answer["choices"][0]["text"] == tokenizer.decode(token_ids)
    drawn = [
        await examples.complete(http, model="mine", prompt="A", max_tokens=8, seed=seed)
        for seed in (1, 1, 2)
    ]
    texts = [answer["choices"][0]["text"] for answer in drawn]
    assert texts[0] == texts[1] != texts[2]
    assert engine.end() == 0
