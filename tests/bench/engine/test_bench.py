from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tandem.bench.engine import chunked as engine_chunked
from tandem.bench.engine import decode as engine_decode
from tandem.bench.engine import load as engine_load
from tandem.bench.engine import prefill as engine_prefill
from tandem.bench.engine import served as engine_served
from tandem.bench.engine import switches as engine_switches
from tandem.bench.engine.__main__ import SECTIONS, main
from tandem.bench.engine.decode import Point
from tandem.bench.engine.floors import decode_bytes, kv_bytes_per_token, prefill_flops
from tandem.bench.engine.load import forget, read_all
from tandem.bench.engine.profile import Idle, Seen
from tandem.bench.engine.rig import Rig, StepRecord, Workshop, host_s, in_parts, intervals_s
from tandem.bench.engine.setting import QWEN3_8B, goal_for
from tandem.bench.kernels.figures import Goal, Measurement, Profile, table, to_figure
from tandem.bench.kernels.timing import Setting, setting_for
from tandem.engine.config import EngineConfig
from tandem.engine.schedule.sequence import Chunk, OnLayers
from tandem.engine.step.sampler import SampledToken

STEP_S = 2e-3
DRY = setting_for("cpu")


@dataclass
class FakeStep:
    """Tokens that are there at once; `seconds` only once they were asked for."""

    found: list[SampledToken] | Exception
    seconds: float = 0.0

    def tokens(self) -> list[SampledToken]:
        if isinstance(self.found, Exception):
            raise self.found
        self.seconds = STEP_S
        return self.found


class FakeRunner:
    """Draws token 7, always."""

    def __init__(self, fails_with: Exception | None = None) -> None:
        self.kv_caches: Any = [SimpleNamespace(num_blocks=64, block_size=16, memory="DRAM")]
        self.model_config: Any = replace(QWEN3_8B, vocab_size=100)
        self.launched: list[int] = []  # chunks of each step
        self._fails_with = fails_with

    def launch(
        self,
        chunks: list[Chunk],
        on_layers: OnLayers | None = None,
        boundaries: Collection[int] = (),
    ) -> FakeStep:
        self.launched.append(len(chunks))
        return FakeStep(
            self._fails_with or [SampledToken(7, None) for chunk in chunks if chunk.samples]
        )


def make_rig(*, overlap: bool, fails_with: Exception | None = None) -> Rig:
    config = EngineConfig(device="cpu", enable_prefix_cache=False, max_num_seqs=8, overlap=overlap)
    return Rig(config, FakeRunner(fails_with))


def dry(module: Any) -> dict[str, Measurement]:
    """What a section's last word is on each figure, in a dry run within this process."""
    return {each.name: each for each in module.run(DRY)}


# --- what is held against what


def test_the_floors_are_those_of_the_published_roofline() -> None:
    assert kv_bytes_per_token(QWEN3_8B) == 147_456
    assert decode_bytes(QWEN3_8B, 0) == pytest.approx(15.14e9, rel=1e-3)
    assert decode_bytes(QWEN3_8B, 1024) / 4.3e12 == pytest.approx(3.56e-3, rel=2e-3)
    assert decode_bytes(QWEN3_8B, 128 * 1024) / 4.3e12 == pytest.approx(8.01e-3, rel=2e-3)
    # Without what nobody reads of the last layer: its matrices but for K/V, and its attention.
    assert prefill_flops(QWEN3_8B, 8192) == pytest.approx(133.6e12 - 3.57e12, rel=1e-3)
    assert prefill_flops(QWEN3_8B, 32768) == pytest.approx(771.9e12 - 20.89e12, rel=1e-3)


@pytest.mark.parametrize(("name", "of"), [("NVIDIA H200", "value"), ("NVIDIA H100", "share")])
def test_targets_in_ms_hold_on_the_gpu_they_are_stated_for_and_scale_elsewhere(
    monkeypatch: pytest.MonkeyPatch, name: str, of: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    setting = Setting(torch.device("cuda:0"), 3, 1, 1e-3)
    for goals in (*engine_decode.GOALS.values(), *engine_prefill.GOALS.values()):
        assert goal_for(setting, *goals).of == of


@pytest.mark.parametrize(
    ("floor_ms", "goals"),
    [
        (3.56, engine_decode.GOALS[1, 1024]),
        (8.01, engine_decode.GOALS[128, 1024]),
        (169.0, engine_prefill.GOALS[8192]),
    ],
)
def test_both_forms_of_a_target_say_the_same_at_the_stated_floor(
    floor_ms: float, goals: tuple[Goal, Goal]
) -> None:
    value, share = goals
    assert value.stretch is not None and share.stretch is not None
    assert floor_ms / value.target == pytest.approx(share.target, rel=2e-3)
    assert floor_ms / value.stretch == pytest.approx(share.stretch, rel=2e-3)


def test_a_time_in_ms_is_held_against_the_ceiling_of_the_run() -> None:
    found = Measurement(
        name="decode",
        label="decode step",
        unit="ms",
        work=15.3e9,
        rate="read",
        seconds=(4.2e-3, 4.0e-3, 4.1e-3),
        goal=Goal(0.848, 0.913, "share"),
    )
    figure = to_figure(found, {"read": 4.3e12}, is_dry=False)
    assert (figure.value, figure.status) == (pytest.approx(4.1), "met")
    assert (figure.limit, figure.share) == (
        pytest.approx(3.558, rel=1e-3),
        pytest.approx(0.868, rel=1e-3),
    )
    assert " ".join(table([figure]).splitlines()[1].split()) == (
        "decode step 4.1 ms 3.558 86.8% >= 84.8% >= 91.3% met"
    )


def test_a_figure_that_is_no_time_has_its_own_unit_and_limit() -> None:
    rate = Measurement(name="load", label="load", unit="GB/s", values=(2.0, 3.0, 2.5), limit=5.0)
    figure = to_figure(rate, {}, is_dry=False)
    assert (figure.value, figure.limit, figure.share, figure.status) == (2.5, 5.0, 0.5, "")
    idle = Measurement(name="i", label="i", unit="%", values=(3.5,), goal=Goal(3.0, 1.0))
    assert to_figure(idle, {}, is_dry=False).status == "missed"
    none = Measurement(name="i", label="i", unit="%", values=(0.0,), goal=Goal(3.0, 1.0))
    assert to_figure(none, {}, is_dry=False).status == "stretch"


# --- the engines that are measured


@pytest.mark.parametrize("overlap", [False, True])
def test_placed_sequences_decode_from_their_context_without_being_computed(
    overlap: bool,
) -> None:
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


def test_what_fails_in_a_step_is_raised() -> None:
    rig = make_rig(overlap=True, fails_with=RuntimeError("illegal address"))
    rig.place(1, 20)
    with pytest.raises(Exception, match="RuntimeError"):
        rig.decode(1)


def test_the_hosts_part_of_an_interval_is_all_but_its_waiting() -> None:
    records = [
        StepRecord(1, 0, 10, 0.0, 0.1, waited_s=waited, ended_at=ended)
        for waited, ended in ((0.5, 1.0), (0.7, 2.0), (0.2, 2.5))
    ]
    assert list(intervals_s(records)) == pytest.approx([1.0, 0.5])
    assert list(host_s(records)) == pytest.approx([0.3, 0.3])


def test_a_part_that_fails_is_named_and_costs_the_others_nothing() -> None:
    def fails() -> Any:
        raise RuntimeError("no room")
        yield

    fine = Measurement(name="fine", label="fine", unit="ms", seconds=(1.0,))
    found = list(in_parts([("first", fails), ("second", lambda: iter([fine]))]))
    assert [(each.name, each.failure) for each in found] == [
        ("first", "RuntimeError: no room"),
        ("fine", ""),
    ]


def test_a_point_that_the_pool_cannot_hold_is_left_out_and_named() -> None:
    rig = make_rig(overlap=False)
    assert engine_decode._fits(rig, Point(2, 100), 4)
    assert not engine_decode._fits(rig, Point(8, 100), 4)
    assert "1024 tokens" in engine_decode._too_large(rig, Point(8, 100)).unavailable


def test_idle_time_is_a_figure_of_its_own_where_a_gpu_was_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile = Profile(num_steps=2, step_ms=4.0, idle_share=0.1, kernels=(), others_ms=0.0)
    seen = Seen(profile, Idle(between_steps=0.02, within_steps=0.08))

    def profiled(run: Callable[[], int], _: Setting) -> Seen:
        assert run() == engine_decode.NUM_PROFILED_DRY
        return seen

    monkeypatch.setattr(engine_decode, "profiled", profiled)
    found = list(engine_decode.profile(make_rig(overlap=True), Point(2, 40), DRY))
    between, within = (to_figure(each, {}, is_dry=False) for each in found)
    assert (between.value, between.status) == (2.0, "met")
    assert (within.value, within.status) == (8.0, "")


# --- the sections, dry


def test_decode_steps_are_measured_at_the_context_asked_for() -> None:
    found = dry(engine_decode)
    one = found["decode_b1_ctx32"]
    assert one.seconds and one.profile is not None and one.profile.kernels
    # half of the steps lie below the context and half above: the token drawn last counts
    assert one.work == decode_bytes(
        Workshop(DRY).model, 1 * (32 + 0.5 + engine_decode.NUM_WARM_STEPS)
    )
    assert "decode_b4_ctx32_p99" in found and "decode_b4_ctx32_idle_by_events" in found
    assert "KV blocks" in found["decode_ready"].note
    assert not any(each.failure for each in found.values())


def test_prompts_are_measured_on_the_device_and_until_their_token() -> None:
    found = dry(engine_prefill)
    device_s, whole_s = found["prefill_64"].seconds[0], found["prefill_64_to_token"].seconds[0]
    assert 0 < device_s <= whole_s
    assert found["prefill_64"].profile is not None
    assert not any(each.failure for each in found.values())


def test_a_prompt_in_chunks_is_held_against_the_limit_and_the_prompt_alone() -> None:
    found = dry(engine_chunked)
    worst = found["chunked_worst_step"]
    assert worst.goal == Goal(250.0)  # what engine.max_step_ms is on a CPU
    assert worst.values[0] >= found["chunked_median_step"].values[0] > 0
    alone_ms = found["chunked_prompt_alone"].seconds[0] * 1e3
    assert found["chunked_prompt_beside"].limit == alone_ms


def test_every_way_of_both_switches_is_measured() -> None:
    found = dry(engine_switches)
    ways = {name.rpartition("_b")[0] for name in found}
    assert ways == {
        f"graphs_{graphs}_overlap_{overlap}"
        for graphs in ("on", "off")
        for overlap in ("on", "off")
    }
    assert all(each.seconds or each.values for each in found.values())


def test_all_bytes_of_the_files_are_read(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    files[0].write_bytes(bytes(engine_load.PIECE_BYTES + 5))
    files[1].write_bytes(b"xyz")
    forget(files)
    assert read_all(files) == engine_load.PIECE_BYTES + 8


def test_loading_is_held_against_reading() -> None:
    found = dry(engine_load)
    assert found["weights_load"].limit == max(found["storage_read"].values)
    assert found["weights_load"].values[0] > 0


def test_policies_are_measured_through_the_whole_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = engine_served.plan_for(DRY)
    one_load = replace(plan, loads=plan.loads[-1:])
    monkeypatch.setattr(engine_served, "plan_for", lambda _: one_load)
    found = dry(engine_served)
    assert len(found) == 3 * 4
    remote, local = (
        found[f"served_c4_{policy}_ttft_p50"] for policy in ("always_remote", "always_local")
    )
    assert remote.values[0] > 0 and local.values[0] > 0
    assert "remotely: 100%" in found["served_c4_always_remote_output_tokens"].note
    assert "remotely: 0%" in found["served_c4_always_local_output_tokens"].note


# --- the command


def test_a_section_that_fails_is_named_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [replace(each, name="unheard of") for each in SECTIONS if each.name == "ceilings"]
    few += [each for each in SECTIONS if each.name == "scheduling"]
    monkeypatch.setattr("tandem.bench.engine.__main__.SECTIONS", few)
    path = tmp_path / "results" / "engine.json"
    assert main(["--device", "cpu", "--once", "--output", str(path), "--commit", "abc"]) == 1
    whole = msgspec.json.decode(path.read_bytes())
    assert list(whole["failures"]) == ["unheard of"]
    assert (whole["commit"], whole["is_dry"]) == ("abc", True)
    assert whole["figures"]["scheduling_overlap_on"]["value"] > 0
    printed = capsys.readouterr().out
    assert "unheard of gave no figure" in printed
    assert "scheduler's host time of a step, 8 running, overlap on" in printed
    assert "what the figures mean" in printed and str(path) in printed
