"""The picture of a run."""

from pathlib import Path

from tandem.bench.client.record import RequestRecord
from tandem.bench.load.plot import draw, write_plot


def answered(*times_s: float) -> RequestRecord:
    num_tokens = len(times_s)
    return RequestRecord(
        0, 0.0, 0.0, times_s[-1], list(times_s), num_output_tokens=num_tokens, has_usage=True
    )


def test_one_long_gap_leaves_the_usual_ones_to_be_seen(tmp_path: Path) -> None:
    runs = {"bench": [[answered(0.1, 0.1, 0.11, 0.12, 5.0)]]}
    ttft, itl, _ = draw(runs).axes
    low, high = itl.get_xlim()
    usual_ms = itl.transAxes.inverted().transform(itl.transData.transform((10.0, 0)))[0]
    assert 0 < low <= 0.1 and high >= 4880
    assert 0.2 < usual_ms < 0.8
    assert ttft.get_xlim()[0] == 0
    write_plot(tmp_path / "run.png", runs)


def test_a_run_without_answers_is_drawn_empty(tmp_path: Path) -> None:
    write_plot(tmp_path / "run.png", {"bench": [[]]})
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
