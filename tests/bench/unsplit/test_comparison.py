"""The comparison as a program, with real clusters, and its documents."""

import json
from pathlib import Path

import pytest

from tandem.bench.report.document import with_part
from tandem.bench.unsplit.__main__ import BEGIN, END, main

SMALL = (
    *("--concurrency", "2", "--input-tokens", "100", "--output-tokens", "8", "--seconds", "1"),
    *("--contender", "default", "--rounds", "1"),
)


def test_an_error_that_is_known_before_costs_no_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\nno end")
    assert main(["--page", str(page)]) == 1
    assert main(["--contender", "disagg-9p9d"]) == 1
    assert main(["--workers", "2", "--contender", "2p1d"]) == 1
    assert main(["--cells", "nothing"]) == 1
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 20, "output_length": 2}\n')
    assert main(["--trace", str(trace), "none.jsonl"]) == 1
    said = capsys.readouterr().err
    hardware = "2p1d has 3 workers and unsplit has 2"
    for named in (END, "disagg-9p9d", hardware, "--cells nothing", "trace none.jsonl"):
        assert named in said
    assert "capacity" not in said


def test_the_page_of_benchmarks_has_a_place_for_the_table() -> None:
    page = Path(__file__).parents[3] / "docs" / "benchmarks.md"
    assert "| cell |" in with_part(page.read_text(), BEGIN, END, "| cell |")


@pytest.mark.slow
def test_a_run_writes_ratios_into_its_document_and_page(tmp_path: Path) -> None:
    output, page = tmp_path / "unsplit.json", tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nearlier\n{END}\nafter\n")
    assert main([*SMALL, "--output", str(output), "--page", str(page)]) == 0
    whole = json.loads(output.read_text())
    (rounds,) = whole["cells"].values()
    names = ["unsplit", "unsplit-round-robin", "default"]
    assert {name: len(values) for name, values in rounds.items()} == dict.fromkeys(names, 1)
    assert all(not each["num_failed"] for values in rounds.values() for each in values)
    assert all(not each["remote_share"] for name in names[:2] for each in rounds[name])
    figure = whole["figures"]["c2-100-8/default/request_throughput"]
    assert len(figure["samples"]) == 1 and 0.1 < figure["value"] < 10
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "earlier" not in text
    assert "| c2-100-8 |" in text
