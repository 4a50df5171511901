"""The progress of `tandem doctor` on a terminal."""

from collections.abc import Iterator

import pytest

from tandem.config.model import load_config
from tandem.launch.doctor import command
from tandem.runtime.local.findings import Finding, ok
from tandem.runtime.process import progress
from tandem.runtime.process.work import Work, on_work


def one(subject: str) -> Iterator[Finding]:
    yield ok(subject, "fine")


def test_each_check_is_named_while_it_runs_and_lines_stay_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SHOWN_AFTER_S", "EVENT_INTERVAL_S", "LINE_INTERVAL_S"):
        monkeypatch.setattr(progress, name, 0.0)
    checks = [(name, one(name)) for name in ("ports", "NIXL")]
    monkeypatch.setattr(command, "examine", lambda _: checks)
    told: list[Work | None] = []
    undo = on_work(told.append)
    assert command.run_doctor(load_config(), as_json=False) == 0
    undo()
    assert [work and (work.share, work.line.rsplit(", ")[-1]) for work in told] == [
        (0.0, "ports"), (0.5, "NIXL"), None,
    ]  # fmt: skip
    assert capsys.readouterr().out.splitlines() == [
        "ok    ports: fine", "ok    NIXL: fine", "2 ok, 0 warn, 0 fail",
    ]  # fmt: skip
