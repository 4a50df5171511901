"""One line about a run's document: its sections with a failure, or that there is none."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tandem.bench.gpu_first_run.__main__ import PROGRAM


def verdict(document: dict[str, Any]) -> str:
    """Return "failed: SECTION ..." or "passed"; a section without time is one that failed."""
    failures: dict[str, str] = document["failures"]
    sections = [section.name for section in PROGRAM.sections if not section.only_named]
    found = {name: any(_is_of(each, name) for each in failures) for name in sections}
    names = [name for name, has_failed in found.items() if has_failed]
    if failures and not names:
        names = ["env"]
    return f"failed: {' '.join(names)}" if names else "passed"


def _is_of(failure: str, section: str) -> bool:
    """Return whether a failure, by the name of a section or of a figure, is of this section."""
    prefix = _PREFIXES.get(section, section)
    return failure in (section, prefix) or failure.startswith(f"{prefix}_")


# Of figures whose names do not begin with their section's.
_PREFIXES = {
    "served_tiny": "served",
    "late_write": "late",
    "ipc_lifetime": "taken",
    "visibility": "unseen",
}


def main(arguments: Sequence[str]) -> None:
    """Print the line for the document of that name; one that is missing has failed."""
    try:
        document = msgspec.json.decode(Path(arguments[0]).read_bytes())
    except (OSError, msgspec.DecodeError):
        document = {"failures": {"env": "there is no document"}}
    print(verdict(document))


if __name__ == "__main__":
    main(sys.argv[1:])
