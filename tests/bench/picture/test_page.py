"""The page of measured runs."""

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from tandem.bench.cli import main
from tandem.bench.client.record import RequestRecord
from tandem.bench.load.runs import Document, Pictured, read_document
from tandem.bench.picture import drawing
from tandem.bench.picture.page import page, rows_of
from tandem.runtime.errors import ConfigError
from tests.bench.picture.runs import document, load, side

MAX_PAGE_BYTES = 600_000


class Outline(HTMLParser):
    """The figures and headings of a page; every element that has an end must end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.titles: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("h1", "h2", "h3"):
            self.titles.append(data)


def written(folder: Path, name: str, whole: Document) -> Path:
    path = folder / name
    path.write_bytes(msgspec.json.encode(whole))
    return path


def test_a_run_is_one_page_that_loads_nothing_from_elsewhere() -> None:
    requests = load(40, 0.1)
    failed = RequestRecord(40, 4.0, 4.0, 4.5, error="status_500", error_message="broken")
    text = page(Pictured.of([("run", document([*requests, failed]))]))
    titles = Outline(text).titles
    for title in ("Time to first token", "Inter-token latency", "Requests over time", "Figures"):
        assert title in titles
    assert "errors: 1 x status_500" in text
    assert not re.search(r"<script|<link|<img|@import|url\((?!#)", text)


def test_a_page_of_many_requests_stays_light() -> None:
    text = page(Pictured.of([("run", document(load(4000, 0.1)))]))
    assert len(text.encode()) < MAX_PAGE_BYTES
    assert "1000 of 4000 requests" in text


def test_words_from_a_document_are_text_on_the_page() -> None:
    hostile = "<script>alert(1)</script>"
    whole = msgspec.structs.replace(document(load(4, 0.1)), title=hostile, commit=hostile)
    text = page(Pictured.of([(hostile, whole), ("b", whole)]))
    assert "<script>" not in text and text.count("&lt;script&gt;") >= 3


def test_two_runs_have_the_ratio_of_the_second_to_the_first() -> None:
    first, second = side("a", 0.1), side("b", 0.2)
    ratios = {row.metric: row.ratio for row in rows_of([first, second])}
    assert ratios["ttft p50"] == pytest.approx(2) and ratios["itl p50"] == pytest.approx(1)


def test_files_of_two_runs_are_drawn_on_one_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = written(tmp_path, "before.json", document(load(20, 0.1)))
    second = written(tmp_path, "after.json", document(load(20, 0.2)))
    target = tmp_path / "new" / "report.html"
    assert main(["report", str(first), str(second), "--report", str(target)]) == 0
    text = target.read_text()
    assert "Requests over time, before" in Outline(text).titles and "second / first" in text
    assert capsys.readouterr().out.strip() == str(target)


def test_a_document_without_requests_has_figures_and_a_hint() -> None:
    whole = msgspec.structs.replace(document(load(20, 0.1)), requests=())
    text = page(Pictured.of([("run", whole)]))
    assert "take it with --records" in text and "time to first token p50, ms" in text


@pytest.mark.parametrize(
    ("old", "new", "at_fault"),
    [
        ('"schema_version":2', '"schema_version":1', "schema_version is 1"),
        ('"workers":1', '"workers":0', "settings.workers"),
        ('"num_requests":4', '"num_requests":"4"', "summary.num_requests"),
        ("{", "[", "malformed"),
    ],
)
def test_a_file_that_is_no_result_is_refused_by_the_field_at_fault(
    old: str, new: str, at_fault: str, tmp_path: Path
) -> None:
    path = written(tmp_path, "run.json", document(load(4, 0.1)))
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=at_fault) as caught:
        read_document(path)
    assert "run.json" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--url", "http://127.0.0.1:1", "--plot", "run.png"], "--plot"),
        (["--url", "http://127.0.0.1:1", "--report", "run.html"], "--report"),
        (["report", "/no/such/file"], "report"),
    ],
)
def test_without_matplotlib_a_drawing_is_refused_before_anything_is_measured(
    words: list[str],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(drawing, "find_spec", lambda name: None)
    assert main(words) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"{named} needs matplotlib: pip install 'matplotlib>=3.8'" in error
