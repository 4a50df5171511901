"""Tests with a mark, run in processes of their own."""

import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import pytest

_TIMEOUT_S = 600  # of all tests; each has its own limit in the new process


def move_apart(mark: str, items: list[pytest.Item]) -> None:
    """Replace the tests with `mark` by one item, in place of the first, that runs them all.

    Leave them where all tests have the mark, as they do in that new pytest.
    """
    marked = [item for item in items if item.get_closest_marker(mark)]
    if not marked or len(marked) == len(items):
        return
    items[items.index(marked[0])] = Apart.of(mark, marked)
    for test in marked[1:]:
        items.remove(test)


class Apart(pytest.Item):
    """Tests that another pytest runs."""

    def __init__(self, *, tests: list[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._tests = tests

    @classmethod
    def of(cls, mark: str, tests: list[pytest.Item]) -> Self:
        assert tests[0].parent is not None
        names = [test.nodeid for test in tests]
        item: Self = cls.from_parent(tests[0].parent, name=f"{mark}_tests_apart", tests=names)
        item.add_marker(pytest.mark.timeout(_TIMEOUT_S))
        return item

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name

    def runtest(self) -> None:
        """Fail with the names of the tests that failed, or of the one that killed the process."""
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
        selection = ["-m", self.config.option.markexpr, *self._tests]
        done = subprocess.run(
            [*command, *selection], cwd=self.config.rootpath, capture_output=True, text=True
        )
        if done.returncode != 0:
            lines = done.stdout.splitlines()
            failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))] or lines[-1:]
            pytest.fail("\n".join([*failed, done.stdout, done.stderr]), pytrace=False)
