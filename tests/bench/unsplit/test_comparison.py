"""The comparison as a program, with real clusters, and its documents."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.bench.report.document import with_part, write_document
from tandem.bench.unsplit.__main__ import BEGIN, END, Comparison, main
from tandem.bench.unsplit.cells import Options
from tandem.runtime.errors import ConfigError

SMALL = (
    *("--concurrency", "2", "--input-tokens", "100", "--output-tokens", "8", "--seconds", "1"),
    *("--contender", "default", "--rounds", "1", "--trace-seconds", "2", "--loads", "knee"),
)


def a_document(path: Path, options: Options, cells: dict[str, Any]) -> None:
    settings = msgspec.to_builtins(dataclasses.asdict(options), enc_hook=str)
    write_document(path, {"settings": settings, "cells": cells})


def test_only_finished_cells_of_a_document_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "unsplit.json"
    one = {"request_throughput": 2.0}
    cells = {
        "c1-300-16": {"unsplit": [one, one], "default": [one, one]},
        "c1-300-64": {"unsplit": [one, one], "default": [one]},
        "c1-300-256": {"unsplit": [one, one]},
    }
    options = Options(contender=("default",), rounds=2, output=path, resume=True, seed=4)
    a_document(path, options, cells)
    assert list(Comparison(options, tmp_path).results) == ["c1-300-16"]
    a_document(path, dataclasses.replace(options, workers=3), cells)
    with pytest.raises(ConfigError, match="workers=3"):
        Comparison(options, tmp_path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="--resume"):
        Comparison(options, tmp_path)


def test_an_error_that_is_known_before_costs_no_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\nno end")
    assert main(["--page", str(page)]) == 1
    assert main(["--contender", "disagg-9p9d"]) == 1
    assert main(["--cells", "nothing"]) == 1
    said = capsys.readouterr().err
    assert END in said and "disagg-9p9d" in said and "--cells nothing" in said


def test_the_page_of_benchmarks_has_a_place_for_the_table() -> None:
    page = Path(__file__).parents[3] / "docs" / "benchmarks.md"
    assert "| cell |" in with_part(page.read_text(), BEGIN, END, "| cell |")


@pytest.mark.slow
def test_a_quick_run_writes_ratios_into_its_document_and_page(tmp_path: Path) -> None:
    output, page = tmp_path / "unsplit.json", tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nearlier\n{END}\nafter\n")
    arguments = ["--contender", "default", "--output", str(output), "--page", str(page)]
    assert main(["--quick", "--cells", "c4-300-64", *arguments]) == 0
    whole = json.loads(output.read_text())
    (rounds,) = whole["cells"].values()
    assert {name: len(values) for name, values in rounds.items()} == {"unsplit": 2, "default": 2}
    assert all(not each["num_failed"] for values in rounds.values() for each in values)
    assert all(not each["remote_share"] for each in rounds["unsplit"])
    figure = whole["figures"]["c4-300-64/default/request_throughput"]
    assert len(figure["samples"]) == 2 and 0.1 < figure["value"] < 10
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "earlier" not in text
    assert "| c4-300-64 |" in text


@pytest.mark.slow
def test_other_hardware_is_refused_and_results_until_then_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, trace = tmp_path / "unsplit.json", tmp_path / "office.jsonl"
    entry = {"input_length": 3000, "output_length": 8, "hash_ids": [1, 2, 3, 4, 5, 6]}
    trace.write_text("\n".join(json.dumps({"timestamp": at * 500, **entry}) for at in range(200)))
    arguments = ["--trace", str(trace), "--cells", "office-knee", "--output", str(output)]
    assert main([*SMALL, *arguments, "--workers", "1"]) == 1
    assert "2 workers and unsplit has 1" in capsys.readouterr().err
    cells = json.loads(output.read_text())["cells"]
    (values,) = cells["office-knee"]["unsplit"]
    assert values["num_requests"] > 1 and not values["num_failed"]


@pytest.mark.slow
def test_ctrl_c_keeps_finished_cells_and_a_later_run_measures_the_rest(tmp_path: Path) -> None:
    output = tmp_path / "unsplit.json"
    arguments = [*SMALL, "--input-tokens", "50", "--seconds", "0.5", "--output", str(output)]

    def cells() -> dict[str, Any]:
        return dict(json.loads(output.read_text())["cells"]) if output.exists() else {}

    command = [sys.executable, "-m", "tandem.bench.unsplit", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        deadline_s = time.monotonic() + 120
        while "c2-50-8" not in cells() and process.poll() is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        table, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "| c2-100-8 |" in table
    finished = cells()["c2-100-8"]
    assert main([*arguments, "--resume"]) == 0
    assert cells()["c2-100-8"] == finished
    assert cells()["c2-50-8"].keys() == {"unsplit", "default"}
