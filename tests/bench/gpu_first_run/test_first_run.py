import math
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tandem.bench.gpu_first_run.__main__ import PROGRAM, main
from tandem.bench.gpu_first_run.smoke import measured
from tandem.bench.gpu_first_run.transfers import _under_way
from tandem.bench.gpu_first_run.verdict import verdict
from tandem.bench.report.setting import setting_for

ROOT = Path(__file__).parents[3]


def run_script(name: str, out: Path) -> str:
    environment = {**os.environ, "OUT": str(out), "PYTHON": sys.executable}
    command = ["bash", f"bench/gpu_first_run/{name}.sh", "--device", "cpu"]
    command += ["--budget", "900"]  # theirs are a GPU's
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1000
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(2100)
def test_both_calls_run_on_a_cpu_and_find_nothing_wrong(tmp_path: Path) -> None:
    assert run_script("correctness", tmp_path).splitlines()[-1] == "passed"
    whole = msgspec.json.decode((tmp_path / "first_run.json").read_bytes())
    assert whole["failures"] == {}
    usual = {section.name for section in PROGRAM.sections if not section.only_named}
    assert set(whole["section_seconds"]) == usual
    assert "==> nixl <==" in (tmp_path / "first_run.log").read_text()
    figures = whole["figures"]
    values = {name: each["value"] for name, each in figures.items() if each["samples"]}
    kernels = "prefill decode kv_store norm products float8 sampling checksum"
    for kernel in kernels.split():
        assert values[f"smoke_{kernel}"] < 1
    equal = "graphs_and_overlap fused_products_and_dependent_launches unseen late late_of_dead"
    assert {values[name] for name in equal.split()} == {0}
    assert values["served_different"] == values["served_builds"] == 0
    assert values["served_remote"] == 1
    run_script("second_call", tmp_path)
    for name in ("kernels", "engine"):
        found = msgspec.json.decode((tmp_path / f"{name}.json").read_bytes())
        assert found["failures"] == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sections_that_run_by_name_find_nothing_wrong_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "named.json"
    names = ["sanitize", "graphs_all", "parity"]
    options = ["--device", "cpu", "--budget", "560", "--output", str(path), "--only", *names]
    assert main(options) == 0
    figures = msgspec.json.decode(path.read_bytes())["figures"]
    equal = "graphs dependent_launches cascade_attention fused_products parity_deterministic"
    assert {figures[name]["value"] for name in [*equal.split(), "parity_together"]} == {0}


def test_the_limits_of_the_usual_sections_fit_the_budget() -> None:
    usual = [section for section in PROGRAM.sections if not section.only_named]
    assert sum(section.timeout_s for section in usual) <= PROGRAM.budget_s


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ({}, "passed"),
        ({"served_remote": "0.5"}, "failed: served_tiny"),
        ({"nixl": "exit 1", "smoke_decode_64x1": "wrong"}, "failed: nixl smoke"),
        ({"unseen": "1", "late_torn": "0"}, "failed: visibility late_write"),
        ({"something": "else"}, "failed: env"),
    ],
)
def test_the_verdict_names_the_sections_that_failed(
    failures: dict[str, str], expected: str
) -> None:
    assert verdict({"failures": failures}) == expected


def test_a_budget_that_is_over_leaves_a_document_of_what_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "first.json"
    options = ["--device", "cpu", "--budget", "1", "--output", str(path), "--only", "env", "smoke"]
    assert main(options) == 1
    assert "smoke may be cut: it and those before it may take 80 s" in capsys.readouterr().err
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
