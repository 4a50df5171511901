"""The progress of loading workers in the terminal of `tandem serve`."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tandem.config.model import load_config
from tandem.config.topology import load_topology
from tandem.launch.run.options import LaunchOptions
from tandem.launch.serve.serve_supervisor import ServeSupervisor
from tandem.runtime.process import reporter
from tandem.runtime.process.reporter import Reporter
from tandem.runtime.store.progress_report import ProgressReport


def report(pid: int, line: str) -> ProgressReport:
    return ProgressReport("decode", "m", "h", pid, line, 0.4)


def test_the_children_that_load_are_named_with_their_remaining_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()
    shown = Reporter(Console(file=written, soft_wrap=True))
    options = LaunchOptions(run_dir=tmp_path / "run")
    topology = load_topology("aggregated")
    supervisor = ServeSupervisor(load_config(), options, shown, topology, tmp_path, "m")
    children: Any = [SimpleNamespace(name="decode0", pid=1), SimpleNamespace(name="decode1", pid=2)]
    supervisor._children = children
    supervisor._progress_changed("a", report(1, "weights: 3 s, 40 %"))
    assert written.getvalue() == "", "elsewhere than on a terminal only now and then"
    monkeypatch.setattr(reporter, "LINE_INTERVAL_S", 0.0)
    supervisor._progress_changed("b", report(2, "weights: 3 s, 20 %, about 9 s left"))
    supervisor._progress_changed("c", report(3, "of another cluster's worker"))
    supervisor._progress_changed("a", None)
    assert written.getvalue() == (
        "... decode0: weights: 3 s, 40 %; decode1: weights: 3 s, 20 %, about 9 s left\n"
    )
