"""Temporary folders, and what killed processes left."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.runtime.local.temporary_folder import TemporaryFolder

PROGRAM = """
import sys
from pathlib import Path
from tandem.runtime.local.temporary_folder import TemporaryFolder

folder = TemporaryFolder("test", Path(sys.argv[1]))
(folder.path / "store").write_text("much")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process, and its folder in `tmp_path`."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_what_a_killed_process_left_is_removed_by_the_next_one(
    other: tuple[subprocess.Popen[str], Path], tmp_path: Path
) -> None:
    process, left = other
    first = TemporaryFolder("test", tmp_path)
    assert (left / "store").exists(), "its process lives"
    process.send_signal(signal.SIGKILL)
    process.wait()
    second = TemporaryFolder("test", tmp_path)
    assert {*tmp_path.iterdir()} == {first.path, second.path}
    first.remove()
    second.remove()
    assert not any(tmp_path.iterdir())


def test_the_newest_ones_of_ended_processes_stay_where_they_are_wanted(tmp_path: Path) -> None:
    for age in range(4):
        folder = tmp_path / f"tandem-logs-{age}"
        folder.mkdir()
        os.utime(folder, ns=(0, 10**9 * (100 - age)))
    TemporaryFolder("logs", tmp_path, keep=2).remove()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["tandem-logs-0", "tandem-logs-1"]


def test_only_folders_of_this_purpose_and_user_are_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [tmp_path / name for name in ("tandem-other-1", "mine", "tandem-test-link")]
    for place in others[:2]:
        place.mkdir()
    (tmp_path / "mine" / "file").touch()
    others[2].symlink_to(tmp_path / "mine")
    TemporaryFolder("test", tmp_path).remove()
    of_another = tmp_path / "tandem-test-2"
    of_another.mkdir()
    owner = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: owner + 1)
        TemporaryFolder("test", tmp_path).remove()
    assert {*tmp_path.iterdir()} == {*others, of_another}
    assert (tmp_path / "mine" / "file").exists()
