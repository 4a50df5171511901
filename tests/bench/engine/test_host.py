import pytest
from typer import Typer
from typer.testing import CliRunner

from tandem.bench.engine.host import main, measure


@pytest.mark.parametrize("overlap", [False, True])
def test_every_step_is_timed_and_decodes_everybody(overlap: bool) -> None:
    found = measure(5, 70, overlap=overlap)
    assert (found.overlap, found.num_seqs) == (overlap, 5)
    assert 0 < found.median_us <= found.p99_us


def test_the_command_prints_a_line_per_mode() -> None:
    app = Typer()
    app.command()(main)
    result = CliRunner().invoke(app, ["--num-seqs", "3", "--num-steps", "20"])
    assert result.exit_code == 0, result.output
    off, on = result.output.splitlines()
    assert off.startswith("overlap off  3 running  median ")
    assert on.startswith("overlap on   3 running  median ")
