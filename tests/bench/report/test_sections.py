from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.bench.kernels.__main__ import PROGRAM as KERNELS
from tandem.bench.report.figures import Bound, Figure, at_most
from tandem.bench.report.process import Ended
from tandem.bench.report.sections import (
    Section,
    SectionOptions,
    SectionProgram,
    best_rates,
    judged,
    results_path,
    run_sections,
)
from tandem.bench.report.setting import setting_for

CEILINGS = next(each for each in KERNELS.sections if each.name == "ceilings")


def run(program: SectionProgram, path: Path, *only: str) -> tuple[int, dict[str, Any]]:
    code = run_sections(program, SectionOptions("cpu", path, "abc", tuple(only)))
    return code, msgspec.json.decode(path.read_bytes())


@pytest.mark.slow
def test_a_dry_run_gives_every_figure_and_judges_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results" / "kernels.json"
    code, whole = run(KERNELS, path, "ceilings", "decode")
    assert (code, whole["failures"]) == (0, {})
    assert (whole["commit"], whole["is_dry"]) == ("abc", True)
    figures = whole["figures"]
    assert {each["verdict"] for each in figures.values()} == {""}
    decode = next(each for name, each in figures.items() if name.startswith("decode_"))
    assert decode["value"] > 0 and len(decode["samples"]) == 1
    assert decode["relative_error"] < 1e-4
    assert set(whole["ceilings_per_s"]) == {"matmul", "copy", "read"}
    printed = capsys.readouterr().out
    assert decode["label"] in printed and str(path) in printed


@pytest.mark.slow
def test_a_section_that_takes_too_long_or_cannot_start_is_named_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Only this process knows the third, as its own can't find it.
    sections = (replace(CEILINGS, timeout_s=0.01), Section("unheard_of", "a:b", 30.0))
    host = Section("layers", "tandem.bench.kernels.layers:run", 60.0)
    program = replace(KERNELS, sections=(*sections, host), budget_s=120.0)
    code, whole = run(program, tmp_path / "out.json")
    assert code == 1
    assert "took more than" in whole["failures"]["ceilings"]
    assert "unheard_of" in whole["failures"]["unheard_of"]
    assert whole["figures"]["embed"]["value"] > 0
    assert "ceilings gave no figure" in capsys.readouterr().out


def test_an_optional_section_fails_no_run_and_no_time_is_no_figure(tmp_path: Path) -> None:
    trial = replace(CEILINGS, timeout_s=0.01, is_optional=True)
    assert run(replace(KERNELS, sections=(trial,)), tmp_path / "a.json")[0] == 0
    code, whole = run(replace(KERNELS, sections=(CEILINGS,), budget_s=0.0), tmp_path / "b.json")
    assert (code, whole["failures"]) == (1, {"ceilings": "no time was left"})


def test_a_section_that_only_its_name_starts_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.bench.report.sections.in_own_process", lambda *_: ([], "", ""))
    hidden = replace(CEILINGS, only_named=True)
    program = replace(KERNELS, sections=(hidden, replace(CEILINGS, name="usual")))
    assert set(run(program, tmp_path / "a.json")[1]["section_seconds"]) == {"usual"}
    assert set(run(program, tmp_path / "b.json", "ceilings")[1]["section_seconds"]) == {"ceilings"}


def test_a_section_that_ends_with_an_error_is_named_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Ended(3, b"", "no such module")
    monkeypatch.setattr("tandem.bench.report.sections.run_bounded", lambda *_: ended)
    code, whole = run(replace(KERNELS, sections=(CEILINGS,)), tmp_path / "a.json")
    assert (code, whole["failures"]) == (1, {"ceilings": "exit 3: no such module"})


def test_a_run_that_is_cut_has_written_the_sections_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cut(Exception):
        pass

    def measure(module: str, section: Section, *rest: Any) -> tuple[list[Figure], str, str]:
        if section.name == "decode":
            raise Cut
        return [Figure("copy_torch", "copy", "TB/s", (3.0,))], "", "the log"

    monkeypatch.setattr("tandem.bench.report.sections.in_own_process", measure)
    path = tmp_path / "kernels.json"
    with pytest.raises(Cut):
        run(KERNELS, path, "ceilings", "decode")
    whole = msgspec.json.decode(path.read_bytes())
    assert whole["figures"]["copy_torch"]["value"] == 3.0
    assert whole["section_logs"] == {"ceilings": "the log"}
    assert path.with_suffix(".log").read_text() == "==> ceilings <==\nthe log\n"


def test_sections_that_measure_the_same_have_figures_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = [Figure("a", "a", "ms", (3.0,))], "", ""
    monkeypatch.setattr("tandem.bench.report.sections.in_own_process", lambda *_: measured)
    program = replace(KERNELS, sections=(CEILINGS, replace(CEILINGS, name="again")))
    assert run(program, tmp_path / "a.json")[1]["figures"].keys() == {"a", "again_a"}


def test_an_unknown_section_is_refused() -> None:
    assert run_sections(KERNELS, SectionOptions("cpu", only=("everything",))) == 2


def test_the_ceiling_is_the_best_of_the_figures_that_measure_it() -> None:
    found = [
        Figure("read_torch", "", "TB/s", (3.0,), bound=Bound("read")),
        Figure("read_triton", "", "TB/s", (4.0, 8.0, 4.0), bound=Bound("read")),
        Figure("decode", "", "TB/s", (9.0,), bound=Bound("read")),
        Figure("copy_wrong", "", "TB/s", bound=Bound("copy"), failure="wrong"),
    ]
    assert best_rates(found) == {"read": 4e12}
    assert [each.ceiling for each in judged(found, is_dry=False)] == [4.0, 4.0, 4.0, None]


def test_nothing_is_judged_in_a_dry_run() -> None:
    (figure,) = judged([Figure("a", "a", "ms", (9.0,), at_most(1.0))], is_dry=True)
    assert figure.verdict == ""


def test_results_lie_in_a_folder_named_after_the_gpu() -> None:
    path = results_path("NVIDIA H200", "kernels.json")
    assert path.parts[-4:] == ("bench", "results", "nvidia-h200", "kernels.json")


def test_a_gpu_is_measured_over_more_data_than_its_cache_holds() -> None:
    setting = setting_for("cuda:0")
    assert (setting.is_dry, setting.rounds) == (False, 7)
    assert setting.num_sets(60e6) * 60e6 > 4 * 60e6
    assert setting.num_sets(10e9) == 2
