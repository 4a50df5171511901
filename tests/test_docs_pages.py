"""The pages against the tree: links, anchors, files and folders that they name."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
SOURCE = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|c|yaml))`")
WORD = re.compile(r"^### (.+)\n\n(.+(?:\n.+)*)", re.MULTILINE)
FOLDER = re.compile(r"^\| `([a-z_/]+)/` \|", re.MULTILINE)


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)


def anchors(page: Path) -> Iterator[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    for title in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(prose(page)):
        other = (page.parent / target).resolve() if target else page
        assert other.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(other), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_source_file_that_a_page_names_exists(page: Path) -> None:
    missing = [name for name in SOURCE.findall(prose(page)) if not (ROOT / name).exists()]
    assert not missing


def test_the_architecture_page_has_one_line_for_every_folder() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = [name.removeprefix("tandem.").replace(".", "/") for name in tool["packages"]]
    listed = FOLDER.findall((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(folders)


def test_every_word_of_the_glossary_is_in_a_file_that_its_entry_names() -> None:
    entries = WORD.findall((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"))
    assert len(entries) >= 25
    for word, entry in entries:
        files = SOURCE.findall(entry)
        assert files, f"{word} names no file"
        whole = rf"(?<![a-z]){word.lower().replace(' ', '[ _-]')}s?(?![a-z])"
        for name in files:
            code = (ROOT / name).read_text(encoding="utf-8").lower()
            assert re.search(whole, code), f"{name} has no {word}"
