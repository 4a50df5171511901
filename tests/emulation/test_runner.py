"""Answers of an emulated device against the judge, whatever the engine does with their KV."""

import random
import time
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from tandem.emulation.pool import seed_of
from tandem.emulation.runner import EmulatedStep, LayersEvent
from tandem.engine.schedule.sequence import LayerProgress, Sequence
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.messages import SamplingParams, StopConditions
from tests.emulation.harness import EmulatedEngine, fast_profile, is_true, random_prompts

SAMPLINGS = [SamplingParams(temperature=0), SamplingParams(seed=2**64 - 1), SamplingParams(seed=5)]


def digests_of(engine: EmulatedEngine) -> NDArray[np.uint64]:
    """The pool's own memory: [num_blocks, 2, block_size]."""
    memory = engine.runner.kv_cache.tensor.reshape(-1).view(np.uint64)
    return memory.reshape(-1, 2, engine.engine.block_pool.block_size)


def filled(engine: EmulatedEngine, prompts: list[list[int]], num_tokens: int) -> None:
    for i, prompt in enumerate(prompts):
        engine.add(f"{len(engine.seqs)}", prompt, num_tokens, SAMPLINGS[i % len(SAMPLINGS)])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("block_size", [1, 64])
def test_answers_of_mixed_steps_are_true(tmp_path: Path, overlap: bool, block_size: int) -> None:
    sizes = {"block_size": block_size, "num_blocks": 8192 // block_size}
    engine = EmulatedEngine(fast_profile(tmp_path), {"overlap": overlap, **sizes})
    filled(engine, random_prompts(12, seed=1), 40)
    engine.run()
    assert engine.wrong() == []
    assert all(len(answer) == 40 for answer in engine.answers.values())


def test_a_second_turn_from_the_prefix_cache_is_true(tmp_path: Path) -> None:
    engine = EmulatedEngine(fast_profile(tmp_path))
    prompts = random_prompts(4, seed=2)
    filled(engine, prompts, 40)
    engine.run()
    turns = [p + a + [9, 9] for p, a in zip(prompts, engine.answers.values(), strict=True)]
    filled(engine, turns, 40)
    engine.run()
    assert all(seq.num_cached_tokens > 0 for seq in list(engine.seqs.values())[4:])
    assert engine.wrong() == []


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_answers_are_true(tmp_path: Path, overlap: bool) -> None:
    engine = EmulatedEngine(fast_profile(tmp_path), {"overlap": overlap, "num_blocks": 24})
    filled(engine, random_prompts(6, seed=3, longest=60), 60)
    engine.run()
    assert engine.engine.scheduler.num_preemptions > 0
    assert engine.wrong() == []


def test_a_flipped_bit_anywhere_in_the_context_is_noticed_soon(
    tmp_path: Path,
) -> None:
    rng = random.Random(4)
    engine = EmulatedEngine(fast_profile(tmp_path), {"enable_prefix_cache": False})
    for i in range(6):
        name = str(i)
        prompt = random_prompts(1, seed=i)[0] + list(range(3, 100))
        seq = engine.add(name, prompt, 150, SAMPLINGS[0])
        while len(engine.answers[name]) < 10:
            engine.step()
        num_true = len(engine.answers[name])
        position = rng.randrange(len(prompt) // 16 * 16)
        digests = digests_of(engine)
        copy, bit = rng.randrange(2), np.uint64(1 << rng.randrange(64))
        digests[seq.block_table[position // 16], copy, position % 16] ^= bit
        engine.run()
        answer = engine.answers[name]
        assert is_true(prompt + answer[:num_true], len(prompt), 0, 16)
        assert not is_true(prompt + answer, len(prompt), 0, 16)


def test_kv_is_written_when_its_step_ends_and_not_at_its_launch(tmp_path: Path) -> None:
    engine = EmulatedEngine(fast_profile(tmp_path), {"overlap": False})
    seq = engine.add("a", list(range(3, 40)), 4, SAMPLINGS[0])
    engine.engine.launch()
    digests = digests_of(engine)
    assert not digests[seq.block_table[0]].any()
    engine.engine.collect()
    assert digests[seq.block_table[0]].all()


def test_layers_are_in_the_pool_when_their_event_has_happened_and_not_before(
    tmp_path: Path,
) -> None:
    engine = EmulatedEngine(fast_profile(tmp_path, step_s=300), {"overlap": False})
    progress: list[LayerProgress] = []
    engine.engine.on_layers = progress.extend
    seq = Sequence("a", list(range(3, 35)), 32, SAMPLINGS[0], StopConditions(1), prefill_only=True)
    seq.num_layer_groups = 4
    engine.engine.add(seq)
    engine.engine.launch()
    assert [each.num_layers for each in progress] == [1, 2, 3]
    (launched,), events = engine.engine._in_flight, [each.event for each in progress]
    assert isinstance(launched.step, EmulatedStep)
    digests, now = digests_of(engine)[seq.block_table[0]], time.perf_counter()
    for event, share in zip(events, (0.25, 0.5, 0.75), strict=True):
        assert isinstance(event, LayersEvent) and not event.query()
        assert launched.step.ends_at - event.due_at == pytest.approx(300 * (1 - share))
    assert not digests.any()
    for event, copies in zip(events, (1, 1, 2), strict=True):
        assert isinstance(event, LayersEvent)
        event.due_at = now
        assert event.query() and digests[:copies].all() and not digests[copies:].any()
    launched.step.ends_at = now
    (output,) = engine.engine.collect()
    assert is_true(list(range(3, 35)) + output.token_ids, 32, 0, 16)


def test_a_gpu_s_defaults_and_the_profile_s_pool_hold_where_nothing_is_configured(
    tmp_path: Path,
) -> None:
    engine = EmulatedEngine(fast_profile(tmp_path), {"block_size": None})
    assert (engine.engine.block_pool.num_blocks, engine.engine.block_pool.block_size) == (64, 64)
    assert engine.engine.overlap
    assert engine.engine.scheduler.max_num_batched_tokens == 8192
    assert engine.engine.max_model_len == 4096


def test_a_step_lasts_as_modelled_and_its_seconds_do_not_count_the_host_s_delay(
    tmp_path: Path,
) -> None:
    engine = EmulatedEngine(fast_profile(tmp_path, step_s=0.02))
    engine.add("a", list(range(3, 40)), 3, SAMPLINGS[0])
    engine.run()
    clock = engine.runner.clock
    assert clock.num_steps == 3
    assert clock.busy_s == pytest.approx(0.06, rel=0.01)
    assert clock.late_s >= 0 and clock.worst_late_s <= clock.late_s


def test_every_parameter_of_sampling_changes_the_draws_and_travels_in_their_seed() -> None:
    plain = SamplingParams(temperature=0.5, seed=7)
    assert (seed_of(plain), seed_of(SamplingParams(temperature=0, seed=7))) == (7, 0)
    changes: dict[str, object] = {
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.1,
        "logit_bias": {3: 1.0},
    }
    seeds = {seed_of(replace(plain, **{key: value})) for key, value in changes.items()}
    assert len(seeds | {7}) == 1 + len(changes)
    assert seed_of(replace(plain, logprobs=3)) == 7


def test_log_probabilities_of_a_prompt_are_refused_by_name_and_others_go_on(tmp_path: Path) -> None:
    engine = EmulatedEngine(fast_profile(tmp_path))
    engine.add("a", list(range(3, 40)), 4, SAMPLINGS[0])
    scored = SamplingParams(temperature=0, logprobs=0, prompt_logprobs=True)
    engine.add("b", list(range(3, 40)), 4, scored)
    errors = []
    while engine.engine.has_work:
        for output in engine.engine.step():
            engine.answers[output.request_id] += output.token_ids
            errors += [output.error] if output.error is not None else []
    (error,) = errors
    assert isinstance(error, InvalidRequestError) and error.param == "prompt_logprobs"
    assert len(engine.answers["a"]) == 4 and engine.answers["b"] == []


def test_log_probabilities_of_an_answer_are_those_of_certain_tokens(tmp_path: Path) -> None:
    engine = EmulatedEngine(fast_profile(tmp_path))
    engine.add("a", [5], 1, SamplingParams(temperature=0, logprobs=2))
    (output,) = engine.engine.step()
    assert output.logprobs is not None
    assert output.logprobs[0].logprob == 0.0
    assert output.logprobs[0].top == [(output.token_ids[0], 0.0)]
