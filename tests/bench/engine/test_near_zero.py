from pathlib import Path

import msgspec
import uvloop

from tandem.bench.engine.near_zero import SAMPLING, main, make_engine, measure
from tandem.bench.stack.near_zero import write_near_zero_model


def test_the_command_measures_computed_and_replayed_steps(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    assert main(["--steps", "3", "--rounds", "2", "--output", str(path)]) == 0
    figures = msgspec.json.decode(path.read_bytes())["figures"]
    assert len(figures) == 8
    for figure in figures.values():
        assert len(figure["samples"]) == 2 and min(figure["samples"]) > 0


def test_a_measured_engine_is_left_empty_and_whole(tmp_path: Path) -> None:
    engine = make_engine(write_near_zero_model(tmp_path / "model"), replayed=True)
    for _ in range(2):
        assert uvloop.run(measure(engine, 5, 20, SAMPLING["drawn"])) > 0
        assert not engine.has_work and not engine.scheduler.exported
        engine.check_invariants()
