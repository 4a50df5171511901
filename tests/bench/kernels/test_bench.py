import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from tandem.bench.kernels.__main__ import SECTIONS, against_torch, main
from tandem.bench.kernels.cases import Case, measure, measure_groups, mismatch, relative_error
from tandem.bench.kernels.figures import (
    Build,
    Goal,
    Measurement,
    builds_table,
    results_path,
    table,
    to_figure,
)
from tandem.bench.kernels.timing import Call, Setting, setting_for
from tandem.bench.report.sections import best_rates

CEILINGS = {"matmul": 800e12, "read": 4e12, "copy": 4e12}


@pytest.fixture
def only_two_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [each for each in SECTIONS if each.name in ("ceilings", "decode")]
    monkeypatch.setattr("tandem.bench.kernels.__main__.SECTIONS", few)


@pytest.mark.usefixtures("only_two_sections")
def test_a_dry_run_gives_every_figure_and_judges_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results" / "kernels.json"
    code = main(["--device", "cpu", "--no-tests", "--output", str(path), "--commit", "abc"])
    whole = msgspec.json.decode(path.read_bytes())
    assert (code, whole["failures"]) == (0, {})
    assert (whole["commit"], whole["is_dry"]) == ("abc", True)
    figures = whole["figures"]
    assert {each["status"] for each in figures.values()} == {"dry"}
    decode = next(each for name, each in figures.items() if name.startswith("decode_"))
    assert decode["value"] > 0 and len(decode["samples"]) == 1
    assert decode["measurement"]["relative_error"] < 1e-4
    assert set(whole["ceilings_per_s"]) == {"matmul", "copy", "read"}
    printed = capsys.readouterr().out
    assert decode["label"] in printed and str(path) in printed


def test_a_section_that_takes_too_long_is_reported_and_makes_the_exit_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = [replace(each, timeout_s=0.01) for each in SECTIONS if each.name == "ceilings"]
    monkeypatch.setattr("tandem.bench.kernels.__main__.SECTIONS", slow)
    path = tmp_path / "kernels.json"
    assert main(["--device", "cpu", "--no-tests", "--output", str(path)]) == 1
    assert "took more than" in msgspec.json.decode(path.read_bytes())["failures"]["ceilings"]
    assert "ceilings gave no figure" in capsys.readouterr().out


def test_a_section_that_cannot_start_leaves_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only this process knows the section, as its own can't find it.
    unknown = [replace(SECTIONS[0], name="unheard of")]
    monkeypatch.setattr("tandem.bench.kernels.__main__.SECTIONS", unknown)
    path = tmp_path / "kernels.json"
    assert main(["--device", "cpu", "--no-tests", "--output", str(path)]) == 1
    assert "unheard of" in msgspec.json.decode(path.read_bytes())["failures"]["unheard of"]


def test_a_wrong_kernel_gets_no_figure() -> None:
    (found,) = measure([case(error=0.5)], dry())
    assert found.seconds == () and "relative error 0.5" in found.failure
    assert to_figure(found, CEILINGS, is_dry=False).status == "failed"


def test_a_kernel_that_turns_wrong_while_it_is_measured_gets_no_figure() -> None:
    errors = iter([0.0, 0.5])
    (found,) = measure([replace(case(), check=lambda run: next(errors))], dry())
    assert found.seconds == () and "relative error 0.5" in found.failure


def test_an_output_that_is_not_finite_is_wrong() -> None:
    assert relative_error(torch.tensor([1.0, math.nan]), torch.ones(2)) == math.inf
    assert relative_error(torch.tensor([1.0, 1.1]), torch.ones(2)) == pytest.approx(
        0.0707, rel=0.01
    )
    assert mismatch(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25


def test_a_kernel_that_raises_costs_no_other_its_figure() -> None:
    def check(_: Call) -> float:
        raise RuntimeError("out of shared memory")

    broken = replace(case(), name="broken", check=check)
    found = {each.name: each for each in measure([broken, case()], dry())}
    assert "out of shared memory" in found["broken"].failure
    assert len(found["fine"].seconds) == 1


def test_what_only_compares_may_be_unavailable() -> None:
    def check(_: Call) -> float:
        raise RuntimeError("no such backend")

    (found,) = measure([replace(case(), check=check, is_ours=False)], dry())
    assert found.unavailable == "RuntimeError: no such backend" and not found.failure
    assert to_figure(found, CEILINGS, is_dry=False).status == ""


def test_a_group_that_cannot_be_set_up_costs_no_other_its_figures() -> None:
    def no_memory(_: Setting) -> list[Case]:
        raise RuntimeError("out of memory")

    first, *others = measure_groups([no_memory, lambda _: [case()]], dry())
    assert (first.name, first.failure) == ("no memory", "RuntimeError: out of memory")
    assert others[-1].seconds


def test_a_case_that_never_ends_is_known_to_be_open() -> None:
    def check(_: Call) -> float:
        raise KeyboardInterrupt

    found = measure_groups([lambda _: [replace(case(), check=check, goal=Goal(1.0))]], dry())
    announced = next(found)
    with pytest.raises(KeyboardInterrupt):
        next(found)
    assert to_figure(announced, CEILINGS, is_dry=False).status == "open"


def test_cases_take_turns_in_every_round() -> None:
    order: list[str] = []

    def named(name: str) -> Case:
        return replace(case(), name=name, num_sets=1, launch=lambda *_: order.append(name))

    setting = replace(dry(), rounds=2, num_warmups=1)
    found = list(measure([named("a"), named("b")], setting))
    assert order == ["a", "b"] * 3
    assert [len(each.seconds) for each in found] == [2, 2], "the first round is a warm-up"


@pytest.mark.parametrize(
    ("unit", "seconds", "goal", "expected"),
    [
        ("TFLOP/s", 1e-3, Goal(600, 660), "met"),
        ("TFLOP/s", 0.9e-3, Goal(600, 660), "stretch"),
        ("TFLOP/s", 1.1e-3, Goal(600, 660), "missed"),
        ("us", 290e-6, Goal(294, 271), "met"),
        ("us", 270e-6, Goal(294, 271), "stretch"),
        ("us", 295e-6, Goal(294, 271), "missed"),
        ("us", 295e-6, None, ""),
    ],
)
def test_a_figure_is_judged_by_its_value(
    unit: str, seconds: float, goal: Goal | None, expected: str
) -> None:
    found = measurement(unit=unit, work=620e9, rate="matmul", seconds=(seconds,) * 3, goal=goal)
    assert to_figure(found, CEILINGS, is_dry=False).status == expected


def test_a_figure_is_judged_by_its_share_of_the_ceiling_of_its_run() -> None:
    found = measurement(work=4e9, rate="read", seconds=(1.1e-3,), goal=Goal(0.85, 0.92, "share"))
    figure = to_figure(found, CEILINGS, is_dry=False)
    assert (figure.status, figure.limit) == ("met", 1000.0)
    assert figure.share == pytest.approx(1 / 1.1)
    assert to_figure(found, {}, is_dry=False).status == "open"


def test_passes_count_readings_of_the_data_at_the_read_ceiling() -> None:
    found = measurement(unit="passes", work=4e9, rate="read", seconds=(2e-3,), goal=Goal(3, 2))
    figure = to_figure(found, CEILINGS, is_dry=False)
    assert (figure.value, figure.limit, figure.status) == (2.0, 1.0, "stretch")


def test_the_ceiling_is_the_best_of_the_section_that_measures_it() -> None:
    found = [
        measurement(name="read_torch", rate="read", work=3.0, seconds=(1.0,)),
        measurement(name="read_triton", rate="read", work=4.0, seconds=(1.0, 0.5, 1.0)),
        measurement(name="decode", rate="read", work=9.0, seconds=(1.0,)),
        measurement(name="copy_wrong", rate="copy", work=9.0, failure="wrong"),
    ]
    assert best_rates(found) == {"read": 4.0}


def test_whole_prompts_are_compared_with_the_fastest_backend_at_their_length() -> None:
    seconds = {
        "sdpa_flash_8k": (2.0, 2.0),
        "sdpa_cudnn_8k": (1.5, 1.5),
        "sdpa_cudnn_16k": (0.1, 0.1),
        "prefill_dense_8k_block64": (1.0, 1.5),
        "prefill_paged_8k_block64": (1.0, 1.0),
        "prefill_dense_32k_block64": (1.0, 1.0),
    }
    found = [measurement(name=name, unit="TFLOP/s", seconds=each) for name, each in seconds.items()]
    found.append(measurement(name="sdpa_efficient_8k", unit="TFLOP/s", unavailable="not here"))
    figures = [to_figure(each, CEILINGS, is_dry=False) for each in found]
    (ratio,) = against_torch(figures, is_dry=False)
    assert ratio.name == "prefill_dense_8k_block64_vs_sdpa"
    assert ratio.samples == pytest.approx((1.5, 1.0))
    assert ratio.status == "met"


def test_the_tables_have_a_line_for_each_figure_and_each_launch() -> None:
    build = Build(
        kernel="_kernel",
        grid=(132,),
        registers=168,
        spilled_words=0,
        shared_bytes=65536,
        num_warps=8,
        num_stages=3,
        blocks_per_sm=1,
        instructions=("wgmma", "tma"),
        constants={"BLOCK_M": "128"},
    )
    found = measurement(
        label="prefill",
        work=620e9,
        rate="matmul",
        seconds=(1e-3,),
        goal=Goal(600.0),
        unit="TFLOP/s",
    )
    figure = to_figure(
        msgspec.structs.replace(found, builds=(build, build), relative_error=2e-3),
        CEILINGS,
        is_dry=False,
    )
    _, line = table([figure]).splitlines()
    assert " ".join(line.split()) == "prefill 620 TFLOP/s 800 77.5% >= 600 met 2.0e-03"
    assert builds_table([figure]).count("132") == 2
    assert "64 KiB" in builds_table([figure]) and "BLOCK_M=128" in builds_table([figure])


def test_results_lie_in_a_folder_named_after_the_gpu() -> None:
    path = results_path("NVIDIA H200", "kernels.json")
    assert path.parts[-4:] == ("bench", "results", "nvidia-h200", "kernels.json")


def test_a_gpu_is_measured_in_bfloat16_over_more_data_than_its_cache_holds() -> None:
    setting = setting_for("cuda:0")
    assert (setting.is_dry, setting.dtype, setting.rounds) == (False, torch.bfloat16, 7)
    assert setting.num_sets(60e6) * 60e6 > 4 * 60e6
    assert setting.num_sets(10e9) == 2


def dry() -> Setting:
    return setting_for("cpu")


def case(error: float = 0.0) -> Case:
    return Case(
        name="fine",
        label="fine",
        unit="us",
        work=1.0,
        rate="read",
        launch=lambda *_: None,
        num_sets=2,
        check=lambda run: error,
        error_bound=1e-2,
    )


def measurement(**fields: object) -> Measurement:
    defaults = {"name": "one", "label": "one", "unit": "us", "work": 1.0}
    return msgspec.convert({**defaults, **msgspec.to_builtins(fields)}, Measurement)
