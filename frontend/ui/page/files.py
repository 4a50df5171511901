"""The files of the page, by path. They hold nothing about the cluster."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


class PageFile(NamedTuple):
    """A file as it is sent."""

    content: bytes
    media_type: str


def _read() -> Iterator[tuple[str, PageFile]]:
    for path in sorted(Path(__file__).parent.iterdir()):
        if path.suffix in _TYPES:
            name = "/ui" if path.name == "index.html" else f"/ui/{path.name}"
            yield name, PageFile(path.read_bytes(), _TYPES[path.suffix])


PAGE_FILES = dict(_read())
PAGE_PATHS = frozenset(PAGE_FILES)  # with API keys too, a browser gets these without one
