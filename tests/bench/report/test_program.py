"""A whole benchmark in small: options, figures, a table and a document."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import pytest

from tandem.bench.report.figures import Figure, at_most, measured
from tandem.bench.report.options import option, parse
from tandem.bench.report.program import in_rounds, run_program
from tandem.runtime.errors import ServiceError

MODULE = "tests.bench.report.test_program"
FIGURES = (Figure("pause_ms", "a pause", "ms", target=at_most(5.0)),)


@dataclass(frozen=True, slots=True)
class Options:
    """Measure a pause."""

    rounds: int = option(3, "rounds", least=1)
    fails: bool = option(False, "fail")
    output: Path | None = option(None, "JSON document")


async def measure_round(options: Options, folder: Path) -> dict[str, float]:
    if options.fails:
        raise ServiceError("the clock has stopped")
    return {"pause_ms": float(folder.name[-1])}


async def measure(options: Options, run_dir: Path) -> list[Figure]:
    rounds = await in_rounds(options.rounds, run_dir, partial(measure_round, options))
    return measured(FIGURES, rounds)


def run(*arguments: str) -> int:
    options = parse(Options, MODULE, arguments)
    return run_program(MODULE, options, {"pause": "a made-up time"}, partial(measure, options))


def test_a_program_prints_its_figures_and_writes_where_they_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "out.json"
    assert run("--output", str(path)) == 0
    printed = capsys.readouterr().out
    assert "1 of 1 targets met" in printed and "a made-up time" in printed
    whole = msgspec.json.decode(path.read_bytes())
    assert whole["commit"] and whole["machine"]["num_cpus"] > 0
    assert whole["command"][:3] == ["python", "-m", MODULE]
    assert whole["settings"] == {"rounds": 3, "fails": False, "output": str(path)}
    assert whole["figures"]["pause_ms"]["samples"] == [1.0, 2.0, 3.0]
    assert whole["figures"]["pause_ms"]["verdict"] == "met"


def test_a_program_that_fails_ends_with_status_1_and_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--fails", "--output", str(tmp_path / "out.json")) == 1
    assert "error: the clock has stopped" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()
