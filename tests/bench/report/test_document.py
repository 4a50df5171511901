from pathlib import Path

import pytest

from tandem.bench.report.document import with_part, write_document
from tandem.runtime.errors import ConfigError


def test_a_document_that_is_written_anew_is_never_half_there(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "figures.json"
    write_document(path, {"round": 1})
    with path.open() as earlier:
        write_document(path, {"round": 2})
        assert '"round": 1' in earlier.read()
    assert '"round": 2' in path.read_text()
    assert [each.name for each in path.parent.iterdir()] == ["figures.json"]


def test_a_part_of_a_page_is_replaced_between_its_marks() -> None:
    page = with_part("above\n<a>\n\nold\n</a>\nbelow\n", "<a>", "</a>", "new\n")
    assert page == "above\n<a>\n\nnew\n\n</a>\nbelow\n"
    assert with_part(page, "<a>", "</a>", "new\n") == page


@pytest.mark.parametrize("page", ["", "<a>", "</a>", "</a> <a>", "<a> <a> </a>", "<a> </a> </a>"])
def test_a_page_without_its_marks_is_refused(page: str) -> None:
    with pytest.raises(ConfigError, match="once each"):
        with_part(page, "<a>", "</a>", "new")
