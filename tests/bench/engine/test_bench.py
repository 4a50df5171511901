from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.bench.engine import chunked as engine_chunked
from tandem.bench.engine import decode as engine_decode
from tandem.bench.engine import prefill as engine_prefill
from tandem.bench.engine import products as engine_products
from tandem.bench.engine import quantized as engine_quantized
from tandem.bench.engine.decode import Point
from tandem.bench.engine.floors import decode_bytes
from tandem.bench.engine.profile import Idle
from tandem.bench.engine.rig import Rig, StepRecord, Workshop, host_s, intervals_s
from tandem.bench.engine.setting import QWEN3_8B
from tandem.bench.report.figures import Figure, at_most
from tandem.bench.report.setting import Setting, setting_for
from tandem.engine.config import DeviceKind, EngineConfig
from tandem.engine.schedule.sequence import Chunk, OnLayers
from tandem.engine.step.outcome import SampledToken, ScoredPart
from tandem.kernels.reference.quantized import Code

STEP_S = 2e-3
DRY = setting_for("cpu")


@dataclass
class FakeStep:
    """A step whose tokens are there at once; `seconds` only after they are collected."""

    found: list[SampledToken]
    seconds: float = 0.0

    def tokens(self) -> list[SampledToken]:
        self.seconds = STEP_S
        return self.found

    def prompt_scores(self) -> list[ScoredPart]:
        return []


class FakeRunner:
    """A runner that always draws token 7."""

    def __init__(self) -> None:
        self.device_kind: DeviceKind = "cpu"
        self.kv_caches: Any = [SimpleNamespace(num_blocks=64, block_size=16, windows=(0,))]
        self.model_config: Any = replace(QWEN3_8B, vocab_size=100)

    def launch(
        self,
        chunks: list[Chunk],
        on_layers: OnLayers | None = None,
        boundaries: Collection[int] = (),
    ) -> FakeStep:
        return FakeStep([SampledToken(7, None) for chunk in chunks if chunk.samples])


def make_rig(*, overlap: bool) -> Rig:
    config = EngineConfig(device="cpu", enable_prefix_cache=False, max_num_seqs=8, overlap=overlap)
    return Rig(config, FakeRunner())


def dry(module: Any) -> dict[str, Figure]:
    """Return a section's last state of each figure, in a dry run within this process."""
    return {each.name: each for each in module.run(DRY)}


# --- the engines that are measured


@pytest.mark.parametrize("overlap", [False, True])
def test_placed_sequences_decode_from_their_context_without_being_computed(overlap: bool) -> None:
    rig = make_rig(overlap=overlap)
    rig.place(4, 40)
    records = rig.decode(5)
    assert [(each.num_decodes, each.num_prompt_tokens) for each in records] == [(4, 0)] * 5
    # the first of them reads the 40 tokens and the one drawn last
    assert [each.num_context_tokens for each in records] == [4 * (41 + i) for i in range(5)]
    assert all(each.device_s == STEP_S for each in records)
    assert all(0 < each.waited_s < each.ended_at - each.launched_at for each in records)
    rig.clear()
    assert not rig.engine.has_work
    assert rig.engine.block_pool.num_free == rig.engine.block_pool.num_blocks


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_is_recorded_from_its_first_chunk_to_its_token(overlap: bool) -> None:
    rig = make_rig(overlap=overlap)
    alone = rig.prefill(rig.prompt(100))
    assert sum(each.num_prompt_tokens for each in alone) == 100
    rig.place(3, 20)
    prompt = rig.prompt(100)
    rig.decode(2)
    beside = rig.prefill(prompt)
    assert sum(each.num_prompt_tokens for each in beside) == 100
    assert all(each.num_decodes == 3 for each in beside)
    assert beside[-1].num_prompt_tokens > 0
    rig.clear()


def test_contexts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(MemoryError, match="1024 tokens has no room for 5 sequences of 300"):
        make_rig(overlap=False).place(5, 300)


def test_the_hosts_part_of_an_interval_is_all_but_its_waiting() -> None:
    records = [
        StepRecord(1, 0, 10, 0.0, waited_s=waited, ended_at=ended)
        for waited, ended in ((0.5, 1.0), (0.7, 2.0), (0.2, 2.5))
    ]
    assert list(intervals_s(records)) == pytest.approx([1.0, 0.5])
    assert list(host_s(records)) == pytest.approx([0.3, 0.3])


def test_a_point_that_the_pool_cannot_hold_is_left_out_and_named() -> None:
    rig = make_rig(overlap=False)
    assert engine_decode._fits(rig, Point(2, 100), 4)
    assert not engine_decode._fits(rig, Point(8, 100), 4)
    assert "1024 tokens" in engine_decode._too_large(rig, Point(8, 100)).notes[0]


def test_idle_time_is_a_figure_of_its_own_where_a_gpu_was_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def profiled(run: Callable[[], int], _: Setting) -> tuple[list[str], Idle]:
        assert run() == engine_decode.NUM_PROFILED_DRY
        return [], Idle(between_steps=0.02, within_steps=0.08)

    monkeypatch.setattr(engine_decode, "profiled", profiled)
    found = engine_decode.profile_steps(make_rig(overlap=True), Point(2, 40), DRY)
    between, within = found
    assert (between.value, between.verdict) == (2.0, "met")
    assert (within.value, within.verdict) == (8.0, "")


# --- the sections, dry


def test_decode_steps_are_measured_at_the_context_asked_for() -> None:
    found = dry(engine_decode)
    one = found["decode_b1_ctx32"]
    assert one.samples and "a step over" in one.notes[1] and one.bound is not None
    # half of the steps lie below the context and half above: the token drawn last counts
    assert one.bound.work == decode_bytes(
        Workshop(DRY).model, 1 * (32 + 0.5 + engine_decode.NUM_WARM_STEPS)
    )
    assert "decode_b4_ctx32_p99" in found and "decode_b4_ctx32_idle_by_events" in found
    assert any("KV blocks" in note for note in found["decode_ready"].notes)
    assert not any(each.failure for each in found.values())


def test_prompts_are_measured_on_the_device_and_until_their_token() -> None:
    found = dry(engine_prefill)
    device_ms, whole_ms = (found[name].samples[0] for name in ("prefill_64", "prefill_64_to_token"))
    assert 0 < device_ms <= whole_ms
    assert "a step over" in found["prefill_64"].notes[0]
    assert found["prefill_64_short_steps"].samples[0] > 0
    assert not any(each.failure for each in found.values())


def test_a_prompt_in_chunks_is_held_against_the_limit_and_the_prompt_alone() -> None:
    found = dry(engine_chunked)
    worst = found["chunked_worst_step"]
    assert worst.target == at_most(250.0)  # engine.max_step_ms on a CPU
    assert worst.samples[0] >= found["chunked_median_step"].samples[0] > 0
    alone_ms = found["chunked_prompt_alone"].samples[0]
    assert found["chunked_prompt_beside"].ceiling == pytest.approx(alone_ms)


@pytest.mark.slow
def test_decode_steps_of_every_variant_are_measured() -> None:
    found = dry(engine_products)
    for variant in engine_products.VARIANTS:
        assert found[f"decode_b1_ctx32_{variant}"].samples[0] > 0
        assert found[f"decode_b2_ctx32_{variant}"].bound is not None
        assert found[f"decode_b2_ctx32_{variant}_host"].samples[0] > 0
    assert not any(each.failure for each in found.values())


def test_prompts_by_quantized_weights_are_held_against_those_by_numbers() -> None:
    found = dry(engine_quantized)
    numbers_ms = found["prefill_numbers"].samples[0]
    for code in engine_quantized.MEASURED:
        (rate,), (codes_ms,) = (found[f"prefill_{code}{of}"].samples for of in ("_rate", ""))
        assert rate == pytest.approx(numbers_ms / codes_ms)
    assert not any(each.failure for each in found.values())


@pytest.mark.parametrize("code", engine_quantized.CODES)
def test_a_model_whose_matrices_are_codes_is_measured(code: Code) -> None:
    plain = Workshop(DRY)
    coded = Workshop(DRY, *engine_quantized.with_codes(plain.model, plain.weights, code))
    rig = coded.rig(max_num_seqs=1)
    (record,) = rig.prefill(rig.prompt(5))
    assert record.num_prompt_tokens == 5
