from pathlib import Path

import msgspec
import pytest

from tandem.bench.engine.host import main, measure


@pytest.mark.parametrize("overlap", [False, True])
def test_every_step_is_timed_and_decodes_every_sequence(overlap: bool) -> None:
    found = measure(5, 70, overlap=overlap)
    assert len(found) == 70 and min(found) > 0


def test_the_command_measures_both_modes(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    arguments = ["--num-seqs", "3", "--num-steps", "20", "--rounds", "2", "--output", str(path)]
    assert main(arguments) == 0
    figures = msgspec.json.decode(path.read_bytes())["figures"]
    for name in ("host_overlap_on", "host_overlap_off"):
        assert 0 < figures[name]["value"] <= figures[f"{name}_p99"]["value"]
        assert len(figures[name]["samples"]) == 2
