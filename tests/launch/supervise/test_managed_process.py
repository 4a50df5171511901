"""Children that are started again."""

import os
import sys
from pathlib import Path

import pytest

from tandem.launch.supervise.managed_process import MAX_RESTARTS, STEADY_S, Backoff, ManagedProcess
from tandem.runtime.errors import ServiceError


def test_waits_double_until_restarts_end() -> None:
    backoff = Backoff()
    waits = [backoff.next_delay_s(lived_s=1.0) for _ in range(MAX_RESTARTS + 1)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, None]


def test_a_steady_life_begins_the_count_again() -> None:
    backoff = Backoff()
    for _ in range(MAX_RESTARTS):
        backoff.next_delay_s(lived_s=1.0)
    assert backoff.next_delay_s(lived_s=STEADY_S) == 0.5


async def test_a_process_can_be_started_again_after_its_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os; print(os.environ['WORD']); raise SystemExit(3)"]
    environment = {**os.environ, "WORD": "ready"}
    process = ManagedProcess("echo-0", "echo", command, environment, tmp_path, placement="CPU")
    with pytest.raises(ServiceError, match="echo-0 was not started"):
        _ = process.child
    for _ in range(2):
        await process.start()
        assert await process.child.wait() == 3
        assert process.pid is None
    assert process.log_path.read_text() == "ready\nready\n"
