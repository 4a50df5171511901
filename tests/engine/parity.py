"""One engine, or two of them, against transformers: the same prompts, tokens and logits."""

import random
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.sequence import Sequence
from tandem.engine.schedule.windows import num_blocks_needed
from tandem.engine.step.outcome import SampledToken
from tandem.runtime.wire.messages import SamplingParams, StopConditions
from tests.accuracy import judged_logits

NUM_TOKENS = 24
PROMPT_LENGTHS = (1, 7, 23, 48, 40)  # the last begins as the one before it does


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    made = [[rng.randrange(3, 512) for _ in range(length)] for length in PROMPT_LENGTHS]
    made[-1][:30] = made[-2][:30]
    return made


def sequence(index: int, prompt: list[int], *, prefill_only: bool = False) -> Sequence:
    return Sequence(
        f"r{index}",
        list(prompt),
        len(prompt),
        SamplingParams(temperature=0.0),
        StopConditions(max_tokens=NUM_TOKENS, ignore_eos=True),
        prefill_only=prefill_only,
    )


def make_engine(folder: Path, num_blocks: int = 200, **options: Any) -> Engine:
    fixed: dict[str, Any] = {"device": "cpu", "block_size": 8, "threads": 1}
    config = EngineConfig(model=str(folder), num_blocks=num_blocks, **fixed, **options)
    return Engine(config, ModelRunner(config))


def generate(engine: Engine) -> list[list[int]]:
    """Return prompt and answer of every prompt, computed together."""
    texts = {f"r{index}": list(prompt) for index, prompt in enumerate(prompts())}
    for index, prompt in enumerate(prompts()):
        engine.add(sequence(index, prompt))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            texts[output.request_id] += output.token_ids
        engine.check_invariants()
    return list(texts.values())


def generate_remotely(folder: Path) -> list[list[int]]:
    """Return what `generate` does, each prompt computed by one engine and answered by another."""
    prefill, decode = make_engine(folder, max_num_batched_tokens=48), make_engine(folder)
    texts = {f"r{index}": list(prompt) for index, prompt in enumerate(prompts())}
    for index, prompt in enumerate(prompts()):
        source, target = sequence(index, prompt, prefill_only=True), sequence(index, prompt)
        prefill.add(source)
        while prefill.has_work:
            outputs = prefill.step()
        reservation = decode.reserve(target)
        assert reservation is not None
        for ordinal, block_id in reservation.fill:
            sent = prefill.runner.kv_caches[0].tensor[source.block_table[ordinal]]
            decode.runner.kv_caches[0].tensor[block_id].copy_(sent)
        prefill.abort(source.request_id)
        first = SampledToken(outputs[0].token_ids[0], None)
        texts[target.request_id] += decode.admit(target.request_id, first).token_ids
    while decode.has_work:
        for output in decode.step():
            texts[output.request_id] += output.token_ids
    return list(texts.values())


def assert_same_when_short_of_blocks(engine: Engine, folder: Path, texts: list[list[int]]) -> None:
    """Assert that `texts`, which `engine` gave, stay the same where blocks are few."""
    windows = engine.block_pool.windows
    num_needed = num_blocks_needed(windows, max(PROMPT_LENGTHS) + NUM_TOKENS, 8)
    short = make_engine(folder, num_blocks=2 * num_needed + 2)
    assert generate(short) == texts
    # Where all layers have windows a sequence that decodes needs less than it began with.
    assert short.load().num_preemptions > 0 or 0 not in windows


def assert_computes_as(folder: Path, model: PreTrainedModel) -> None:
    """Compare in ragged batches, in chunks, over a cached prefix, preempted, prefilled remotely."""
    engine = make_engine(folder, max_num_batched_tokens=24, prefill_chunk_tokens=5)
    texts = generate(engine)
    assert_greedy(model, texts)
    assert len({token for text in texts for token in text[-NUM_TOKENS:]}) > NUM_TOKENS
    assert engine.prefix_hit(sequence(9, prompts()[3])) == 40
    assert generate(engine) == texts
    assert generate_remotely(folder) == texts
    assert_same_when_short_of_blocks(engine, folder, texts)
    assert_same_logits(engine, model, texts[3])


def assert_greedy(model: PreTrainedModel, texts: list[list[int]]) -> None:
    """Assert that each token after a prompt is the likeliest by transformers."""
    for prompt, text in zip(prompts(), texts, strict=True):
        assert len(text) == len(prompt) + NUM_TOKENS
        rows = slice(len(prompt) - 1, -1)
        judged_logits(model, text).assert_likeliest(text[len(prompt) :], rows)


def assert_same_logits(engine: Engine, model: PreTrainedModel, text: list[int]) -> None:
    """Compare the logits at three places of `text`, behind a token that no cached prefix has."""
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    seen: list[torch.Tensor] = []
    compute = runner._steps.model.logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(compute(hidden))
        return seen[-1]

    runner._steps.model.logits = watched  # type: ignore[method-assign]
    fresh = [3, *text]
    for end in (20, 49, len(fresh)):
        params, stop = SamplingParams(temperature=0.0), StopConditions(max_tokens=1)
        engine.add(Sequence(f"to {end}", fresh[:end], end, params, stop))
        while engine.has_work:
            engine.step()
    judged_logits(model, fresh).assert_near(torch.cat(seen), [19, 48, -1])
