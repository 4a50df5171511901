"""A sequence that no step can compute, beside others that must not notice."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine import Engine
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.schedule.sequence import LayerProgress, Sequence
from tandem.models.random_model import write_random_model
from tandem.runtime.errors import InternalError
from tandem.runtime.wire.messages import SamplingParams, StopConditions

VOCAB_SIZE = 320


def prompt(num_tokens: int, first: int = 100) -> list[int]:
    return list(range(first, first + num_tokens))


def make_honest(fake: SimpleNamespace) -> list[Sequence]:
    """Sequences that are in prompt and answer at different times, some past one step's budget."""
    return [
        fake.make_seq(f"r{i}", prompt(num_tokens, 30 * i), 5 + i)
        for i, num_tokens in enumerate((3, 9, 21, 6))
    ]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
@pytest.mark.parametrize("how", ["poison", "late_poison", "not_finite"])
def test_a_sequence_that_fails_every_step_ends_alone(
    fake: SimpleNamespace, how: str, num_steps: int
) -> None:
    harness = fake.make_harness(max_num_batched_tokens=16)
    honest = make_honest(fake)
    expected = {seq.request_id: fake.undisturbed(seq) for seq in honest}
    for seq in (*honest[:2], fake.make_seq("bad", prompt(7, 400), 30), *honest[2:]):
        harness.engine.add(seq)
    for _ in range(num_steps):
        harness.step()
    getattr(harness.runner, how).add("bad")
    harness.run()
    bad = harness.finished.pop("bad")
    assert bad.finish_reason == "error" and isinstance(bad.error, InternalError)
    assert {name: harness.texts[name] for name in expected} == expected
    assert all(output.error is None for output in harness.finished.values())
    harness.assert_all_free()


@pytest.mark.parametrize("field", ["fail_with", "fail_later_with"])
def test_an_error_that_does_not_come_again_ends_nobody(fake: SimpleNamespace, field: str) -> None:
    harness = fake.make_harness(max_num_batched_tokens=16)
    honest = make_honest(fake)
    expected = {seq.request_id: fake.undisturbed(seq) for seq in honest}
    for seq in honest:
        harness.engine.add(seq)
    for _ in range(3):
        harness.step()
    setattr(harness.runner, field, RuntimeError("once"))
    harness.run()
    assert harness.texts == expected
    assert {output.finish_reason for output in harness.finished.values()} == {"length"}
    harness.assert_all_free()


def test_a_sequence_that_is_gone_is_not_tried_again(fake: SimpleNamespace) -> None:
    harness = fake.make_harness()
    for i in range(3):
        harness.engine.add(fake.make_seq(f"r{i}", prompt(5, 30 * i), 4))
    harness.runner.fail_with = RuntimeError("once")
    harness.step()
    for i in range(3):
        assert harness.engine.abort(f"r{i}")
    harness.run()
    assert harness.runner.steps == [] and not harness.finished
    harness.assert_all_free()


def test_blocks_of_logits_that_are_not_finite_are_not_shared(fake: SimpleNamespace) -> None:
    harness = fake.make_harness()
    harness.runner.not_finite.add("bad")
    harness.engine.add(fake.make_seq("bad", prompt(13), 4))
    harness.engine.add(fake.make_seq("good", prompt(13, 200), 4))
    harness.run()
    assert harness.engine.prefix_hit(fake.make_seq("again", prompt(13))) == 0
    assert harness.engine.prefix_hit(fake.make_seq("again", prompt(13, 200))) == 12


def test_layers_that_were_announced_are_not_computed_again(fake: SimpleNamespace) -> None:
    """They may be under way to another worker, which compares them with their checksums."""
    harness = fake.make_harness()
    news: list[LayerProgress] = []

    def listen_and_fail(progress: list[LayerProgress]) -> None:
        news.extend(progress)
        raise RuntimeError("device lost")

    harness.engine.on_layers = listen_and_fail
    harness.engine.add(fake.make_seq("sent", prompt(9), 1, prefill_only=True, num_layer_groups=2))
    other = fake.make_seq("other", prompt(9, 300), 4)
    expected = fake.undisturbed(other)
    harness.engine.add(other)
    harness.run()
    assert [progress.request_id for progress in news] == ["sent"]
    assert isinstance(harness.finished["sent"].error, InternalError)
    assert harness.engine.block_pool.num_held == 3  # a transfer may be reading them
    assert harness.texts["other"] == expected
    harness.engine.abort("sent")
    harness.assert_all_free()


# ---- numbers that got past every check, in a real model --------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(
        tmp_path_factory.mktemp("model"),
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=64,
        tie_word_embeddings=False,
    )


BAD: list[dict[str, Any]] = [
    {"top_k": 2**63 + 5, "temperature": 1.0}, {"repetition_penalty": 1e-40},
    {"repetition_penalty": 0.0}, {"logit_bias": {5: float("nan")}},
    {"logit_bias": {5: float("inf")}}, {"logprobs": -3},
    {"min_tokens": 2**63 - 1, "presence_penalty": 1.0}, {"prompt": [5, 2**31]},
]  # fmt: skip
HONEST: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    {"presence_penalty": 1.0, "logprobs": 2},
    {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.2, "logit_bias": {9: 2.0}},
]


def sequence(name: str, first: int, fields: dict[str, Any]) -> Sequence:
    fields = {"temperature": 0.0, **fields}
    token_ids = fields.pop("prompt", prompt(9, first))
    stop = StopConditions(12, min_tokens=fields.pop("min_tokens", 0), ignore_eos=True)
    return Sequence(name, token_ids, len(token_ids), SamplingParams(**fields), stop)


def generate(engine: Engine, seqs: list[Sequence], late: list[Sequence]) -> dict[str, list[int]]:
    """The texts of `seqs`, with `late` coming one by one meanwhile; of failed ones nothing."""
    texts: dict[str, list[int]] = {}
    errors = set()
    for seq in seqs:
        engine.add(seq)
    while engine.has_work or late:
        if late:
            engine.add(late.pop())
        engine.launch()
        engine.check_invariants()
        for output in engine.collect():
            texts.setdefault(output.request_id, []).extend(output.token_ids)
            if output.error is not None:
                errors.add(output.request_id)
        engine.check_invariants()
    return {name: text for name, text in texts.items() if name not in errors}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_bad_number_fails_its_sequence_and_no_other(
    folder: Path, overlap: bool, kernels: str
) -> None:
    config = EngineConfig(
        model=str(folder), device="cpu", block_size=4, num_blocks=128, overlap=overlap, threads=1,
        kernels=kernels, enable_prefix_cache=False,
    )  # fmt: skip
    engine = Engine(config, ModelRunner(config))
    honest = [(f"r{i}", 20 * i, fields) for i, fields in enumerate(HONEST)]
    expected: dict[str, list[int]] = {}
    for each in honest:
        expected |= generate(engine, [sequence(*each)], [])
    bad = [sequence(f"bad{i}", 150 + 10 * i, fields) for i, fields in enumerate(BAD)]
    texts = generate(engine, [sequence(*each) for each in honest], bad)
    assert texts == expected and all(len(text) == 12 for text in texts.values())
    assert engine.block_pool.num_free == 128
