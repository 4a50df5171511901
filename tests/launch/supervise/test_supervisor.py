"""Children that end again and again: one that is needed ends the launch, a planner does not."""

import asyncio
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from tandem.config.model import load_config
from tandem.launch.run.options import LaunchOptions
from tandem.launch.supervise import managed_process
from tandem.launch.supervise.managed_process import ManagedProcess
from tandem.launch.supervise.supervisor import Supervisor
from tandem.runtime.errors import ServiceError
from tandem.runtime.process.reporter import Reporter
from tandem.runtime.store.etcd import EtcdDiscovery


class Kept(Supervisor):
    """A supervisor of one child that ends as soon as it begins."""

    def __init__(self, folder: Path, kind: str, written: io.StringIO) -> None:
        reporter = Reporter(Console(file=written, soft_wrap=True))
        super().__init__(load_config(), LaunchOptions(run_dir=folder / "run"), reporter)
        words = [sys.executable, "-c", "raise SystemExit('no work')"]
        self.only = ManagedProcess(f"{kind}-0", kind, words, {}, self._run_dir, placement="CPU")

    async def _start_children(self, discovery: EtcdDiscovery) -> None:
        raise NotImplementedError

    def _drain_order(self) -> Sequence[str]:
        return ()

    def _report_ready(self) -> None: ...

    async def keep(self) -> None:
        """Keep the child up until it has ended for good."""
        await self._start_child(self.only)
        await asyncio.wait_for(self._keep_all(), 60)


@pytest.fixture(autouse=True)
def few_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managed_process, "MAX_RESTARTS", 1)


async def test_a_worker_that_ends_too_often_ends_the_launch(tmp_path: Path) -> None:
    with pytest.raises(
        ServiceError, match=r"worker-0 exited with 1 for the 2th time(.|\n)*no work"
    ):
        await Kept(tmp_path, "worker", io.StringIO()).keep()


async def test_a_planner_that_ends_too_often_is_given_up(tmp_path: Path) -> None:
    written = io.StringIO()
    await Kept(tmp_path, "planner", written).keep()
    assert "no work\nthe others serve on without it" in written.getvalue()
