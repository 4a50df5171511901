"""Progress of long work."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from tandem.runtime.process import progress
from tandem.runtime.process.progress import ProgressBar
from tandem.runtime.process.work import Work, in_words, on_work


class Clock:
    """Seconds that a test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    """A terminal's file."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=clock))
    return clock


def test_without_a_terminal_long_work_writes_a_line_now_and_then(clock: Clock) -> None:
    stream = io.StringIO()
    with ProgressBar("bench", total=4, console=Console(file=stream, highlight=False)) as bar:
        for second in range(12):
            clock.now_s = 100.0 + second
            bar.update(second / 4, "round 1")
    first, second = stream.getvalue().splitlines()
    assert first.startswith("bench: 5 s, 31 %") and first.endswith("round 1")
    assert second.startswith("bench: 10 s, 62 %")


def test_a_line_has_the_remaining_time(clock: Clock) -> None:
    lines: list[str] = []
    bar = ProgressBar("weights", total=100, on_line=lines.append)
    bar._bar.get_time = clock
    for second in range(6):
        clock.now_s = 100.0 + second
        bar.advance(10)
    assert lines == ["weights: 5 s, 60 %, about 4 s left"]


def test_a_terminal_shows_a_bar_for_work_over_two_seconds_alone(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with ProgressBar("weights", total=2, console=Console(file=stream)) as bar:
        bar.update(1)
        assert stream.getvalue() == ""
        clock.now_s += 2.5
        bar.update(1.5)
    assert "weights" in stream.getvalue() and "75%" in stream.getvalue()


def test_a_time_has_the_unit_that_fits() -> None:
    assert [in_words(seconds) for seconds in (3.2, 119, 600, 7300)] == [
        "3 s",
        "119 s",
        "10 min",
        "2.0 h",
    ]


def test_long_work_has_events_until_it_is_over(clock: Clock) -> None:
    told: list[Work | None] = []
    undo = on_work(told.append)
    with ProgressBar("weights", total=10, on_line=lambda line: None) as bar:
        for half_second in range(9):
            clock.now_s = 100.0 + half_second / 2
            bar.update(half_second)
    undo()
    clock.now_s += 60
    bar.advance()
    *works, last = told
    assert last is None
    assert [(work.line[:10], work.share) for work in works if work] == [
        ("weights: 2", 0.4), ("weights: 3", 0.6), ("weights: 4", 0.8),
    ]  # fmt: skip


def test_short_work_has_no_events(clock: Clock) -> None:
    told: list[Work | None] = []
    undo = on_work(told.append)
    with ProgressBar("weights", total=2, on_line=lambda line: None) as bar:
        clock.now_s += 1.9
        bar.advance()
    undo()
    assert told == []
