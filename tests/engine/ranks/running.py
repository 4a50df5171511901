"""The bits that an engine computes: of its answers, and of its KV pool."""

import hashlib
import os
import random
import signal
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.sequence import Sequence
from tandem.engine.step.outcome import DeviceLostError
from tandem.runtime.wire.messages import SamplingParams, StopConditions

REQUESTS = [
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=0.9, top_p=0.9, seed=11, logprobs=1),
    SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=True),
    SamplingParams(temperature=1.1, top_k=40, seed=12, logprobs=1, repetition_penalty=1.2),
]


def config_of(model: Path, tp: int, **settings: object) -> EngineConfig:
    fields = {"model": str(model), "device": "cpu", "kernels": "c", "num_blocks": 128, "tp": tp}
    # Chunks that do not depend on time take the same blocks in every run.
    fields |= {"max_num_batched_tokens": 64, "max_step_ms": 1e6}
    return EngineConfig.model_validate(fields | settings)


def bits_of(runner: ModelRunner, vocab_size: int) -> tuple[str, str]:
    """Return a digest of all answers with log probabilities, and one of the KV pool.

    Prompts are computed in chunks, beside decodes; some share a head, which is cached.
    """
    engine, rng = Engine(runner.config, runner), random.Random(3)
    head = [rng.randrange(3, vocab_size) for _ in range(40)]
    for index, sampling in enumerate(REQUESTS):
        tail = [rng.randrange(3, vocab_size) for _ in range(3 + 30 * index)]
        prompt = head + tail if index % 2 else tail
        stop = StopConditions(max_tokens=12 + index, ignore_eos=True)
        engine.add(Sequence(f"r{index}", prompt, len(prompt), sampling, stop))
    answers: dict[str, list[object]] = {}
    while engine.has_work:
        for output in engine.step():
            found = answers.setdefault(output.request_id, [])
            found += [*output.token_ids, *(output.logprobs or []), output.prompt_logprobs]
        engine.check_invariants()
    pool = runner.kv_cache.tensor.view(torch.uint8).numpy()
    said = repr(sorted(answers.items())).encode()
    return hashlib.sha256(said).hexdigest(), hashlib.sha256(pool).hexdigest()


def add_long(engine: Engine) -> None:
    """Add a sequence that goes on for as long as a test looks."""
    stop = StopConditions(max_tokens=2000, ignore_eos=True)
    engine.add(Sequence("a", [3, 4, 5], 3, SamplingParams(temperature=0.0), stop))


def lose_rank(runner: ModelRunner, number: signal.Signals, *, is_busy: bool) -> DeviceLostError:
    """End or stop rank 1 of 2 by a signal; return the error that the listener is told.

    What it says and that the engine gets one too is asserted.
    """
    followers, lost = runner.followers, SimpleQueue[DeviceLostError]()
    assert followers is not None
    followers.listen(lost.put)
    engine, [pid] = Engine(runner.config, runner), followers.pids
    add_long(engine)
    engine.step()
    os.kill(pid, number)
    if is_busy:
        with pytest.raises(DeviceLostError, match=f"by {number.name}"):
            while engine.step():
                pass
    error = lost.get(timeout=30)
    assert f"rank 1 of 2 (pid {pid})" in error.message
    with pytest.raises(DeviceLostError):
        engine.step()
    return error
