import re
from pathlib import Path

import msgspec
import pytest

from tandem.bench.gpu_first_run.__main__ import PROGRAM, main
from tandem.bench.kernels.__main__ import SANITIZED_TESTS


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
    for name, num_passed in (("tests", 1), ("tests_sanitized", len(SANITIZED_TESTS))):
        assert values[name] == 0
        assert int(re.findall(r"(\d+) passed", figures[name]["label"])[0]) >= num_passed
    equal = ("graphs", "graphs_and_overlap", "dependent_launches", "fused_products")
    equal += ("fused_products_and_dependent_launches", "parity_together", "parity_deterministic")
    assert {values[name] for name in equal} == {0}
    assert values["unseen"] == values["late"] == values["served_different"] == 0
    assert values["served_remote"] == 1 and values["served_builds"] == 0


def test_a_budget_that_is_over_leaves_a_document_of_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "first.json"
    options = ["--device", "cpu", "--budget", "1", "--output", str(path), "--only", "env", "tests"]
    assert main(options) == 1
    failures = msgspec.json.decode(path.read_bytes())["failures"]
    assert failures.keys() >= {"tests"} and "no time was left" in failures["tests"]
