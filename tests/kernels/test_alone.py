"""One process of a machine builds kernels at a time, and none waits for ever."""

import logging
import threading
from pathlib import Path

import pytest

from tandem.kernels.alone import alone_on_this_machine


def test_a_second_builder_waits_for_the_first(tmp_path: Path) -> None:
    entered = threading.Event()

    def build() -> None:
        with alone_on_this_machine(tmp_path / "cache"):
            entered.set()

    with alone_on_this_machine(tmp_path / "cache"):
        second = threading.Thread(target=build)
        second.start()
        assert not entered.wait(0.2)
    assert entered.wait(60)
    second.join()


def test_a_builder_that_does_not_end_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with alone_on_this_machine(tmp_path), alone_on_this_machine(tmp_path, patience_s=0):
        assert "not waiting" in caplog.text


def test_a_folder_that_cannot_be_written_to_needs_no_lock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING), alone_on_this_machine(tmp_path / "file"):
        assert "are not kept" in caplog.text
