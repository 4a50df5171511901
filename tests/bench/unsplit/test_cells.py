import json
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.bench.load.trace import read_trace
from tandem.bench.load.workload import Seeds
from tandem.bench.unsplit.cells import SHARES, Options, chosen, grid_cells, trace_cells, trace_names
from tandem.runtime.errors import ConfigError

OPTIONS = Options(seed=1)


def a_trace(folder: Path, *, num_entries: int = 1000, gap_ms: int = 500) -> Path:
    path = folder / "office.jsonl"
    entry = {"input_length": 512, "output_length": 8, "hash_ids": [1]}
    lines = (json.dumps({"timestamp": at * gap_ms, **entry}) for at in range(num_entries))
    path.write_text("\n".join(lines))
    return path


def test_the_grid_has_every_combination_once() -> None:
    names = [cell.name for cell in grid_cells(OPTIONS)]
    assert len(names) == len(set(names)) == 5 * 3 * 3
    assert "c16-4000-256" in names
    (cell,) = grid_cells(
        replace(OPTIONS, concurrency=(3,), input_tokens=(70,), output_tokens=(9,), seconds=2.0)
    )
    plan, spec = cell.load.plan(), next(cell.load.workload().prompts(Seeds(0, "")))
    assert (cell.name, plan.concurrency, plan.duration_s) == ("c3-70-9", 3, 2.0)
    assert (len(spec.prompt), spec.num_output_tokens) == (70, 9)


@pytest.mark.parametrize("load", SHARES)
def test_a_trace_arrives_at_its_share_of_the_capacity(load: str, tmp_path: Path) -> None:
    options = replace(OPTIONS, trace_seconds=20.0)
    cells = {cell.name: cell for cell in trace_cells(a_trace(tmp_path), 6.0, options)}
    prompts = list(cells[f"office-{load}"].load.workload().prompts(Seeds(0, "")))
    assert len(prompts) == pytest.approx(SHARES[load] * 6.0 * 20.0, abs=1)  # type: ignore[index]
    assert prompts[-1].offset_s == pytest.approx(20.0, rel=0.02)


def test_a_short_trace_keeps_the_rate_and_ends_earlier(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, num_entries=31)
    (cell,) = trace_cells(trace, 4.0, replace(OPTIONS, loads=("low",)))
    prompts = list(cell.load.workload().prompts(Seeds(0, "")))
    assert len(prompts) == len(read_trace(trace))
    assert prompts[-1].offset_s == pytest.approx(31 / 2.0)


def test_a_trace_without_time_between_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="all at once"):
        list(trace_cells(a_trace(tmp_path, gap_ms=0), 4.0, OPTIONS))


def test_cells_are_chosen_by_name_and_a_pattern_without_a_cell_is_refused() -> None:
    options = replace(OPTIONS, trace=(Path("a/office.jsonl"),))
    names = [*(cell.name for cell in grid_cells(options)), *trace_names(options)]
    assert chosen(names, ()) == set(names)
    assert chosen(names, ("c4-1500-*", "*-knee")) == {
        *("c4-1500-16", "c4-1500-64", "c4-1500-256", "office-knee")
    }
    with pytest.raises(ConfigError, match="--cells c5-"):
        chosen(names, ("c4-*", "c5-*"))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"contender": ("default", "unsplit")}, "--contender"),
        ({"contender": ("unsplit-round-robin",)}, "--contender"),
        ({"contender": ("a/mine.yaml", "b/mine.yaml")}, "--contender"),
        ({"trace": (Path("a/x.jsonl"), Path("b/x.jsonl"))}, "--trace"),
        ({"tight": "itl:5"}, "itl:5"),
    ],
)
def test_options_that_do_not_fit_together_are_named(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Options(**wrong)  # type: ignore[arg-type]


def test_without_a_contender_the_default_and_each_split_are_compared() -> None:
    assert OPTIONS.resolved().contender == ("default", "1p1d")
    assert replace(OPTIONS, workers=4).resolved().contender == ("default", "1p3d", "2p2d", "3p1d")
    named = replace(OPTIONS, contender=("2p2d",))
    assert named.resolved() == named


def test_a_run_has_a_seed_and_quick_is_short() -> None:
    assert Options().resolved().seed != Options().resolved().seed
    assert OPTIONS.resolved().seed == OPTIONS.seed
    quick = replace(OPTIONS, quick=True).resolved()
    assert len(grid_cells(quick)) * quick.rounds * quick.seconds < 20
