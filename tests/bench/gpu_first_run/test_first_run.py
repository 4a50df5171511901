import math
from pathlib import Path

import msgspec
import pytest

from tandem.bench.gpu_first_run.__main__ import PROGRAM, main
from tandem.bench.gpu_first_run.smoke import measured
from tandem.bench.gpu_first_run.transfers import _under_way
from tandem.bench.report.setting import setting_for


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_section_runs_on_a_cpu_and_finds_nothing_wrong(tmp_path: Path) -> None:
    path = tmp_path / "first.json"
    code = main(["--device", "cpu", "--budget", "560", "--output", str(path)])
    whole = msgspec.json.decode(path.read_bytes())
    assert whole["failures"] == {} and code == 0
    assert set(whole["section_seconds"]) == {section.name for section in PROGRAM.sections}
    figures = whole["figures"]
    values = {name: each["value"] for name, each in figures.items() if each["samples"]}
    kernels = "prefill decode kv_store norm products float8 sampling checksum"
    for kernel in kernels.split():
        assert values[f"smoke_{kernel}"] < 1
    equal = ("graphs", "graphs_and_overlap", "dependent_launches", "cascade_attention")
    equal += (
        "fused_products",
        "fused_products_and_dependent_launches",
        "parity_together",
        "parity_deterministic",
    )
    assert {values[name] for name in equal} == {0}
    assert values["unseen"] == values["late"] == values["served_different"] == 0
    assert values["served_remote"] == 1 and values["served_builds"] == 0


def test_a_budget_that_is_over_leaves_a_document_of_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "first.json"
    options = ["--device", "cpu", "--budget", "1", "--output", str(path), "--only", "env", "smoke"]
    assert main(options) == 1
    failures = msgspec.json.decode(path.read_bytes())["failures"]
    assert failures.keys() >= {"smoke"} and "no time was left" in failures["smoke"]


def test_a_kernel_with_one_wrong_shape_fails_and_names_it() -> None:
    errors = [("fine", 0.1, 1.0), ("over", 3.0, 1.0), ("no number", math.nan, 1.0)]
    found = measured(iter(errors))
    assert found.failure == "2 of 3 shapes are wrong: over: 3 over 1; no number: nan over 1"
    assert measured(iter(errors[:1])).failure == ""


def test_a_late_write_of_which_none_was_under_way_has_shown_nothing() -> None:
    on_a_gpu, dry = setting_for("cuda:0"), setting_for("cpu")
    assert "is required" in _under_way(on_a_gpu, "torn", 0, 4).failure
    assert not _under_way(on_a_gpu, "torn", 1, 4).failure
    assert not _under_way(dry, "torn", 0, 4).failure
