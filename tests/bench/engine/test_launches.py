"""The host's time of launches that go nowhere."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tandem.bench.engine.launches import MODULE, main

pytest.importorskip("triton")


@pytest.mark.slow
def test_steps_are_launched_and_timed_without_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "launches.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", MODULE, "--layers", "1", "--steps", "2", "--rounds", "2"]
    command += ["--output", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = msgspec.json.decode(path.read_bytes())["figures"]
    assert list(figures) == ["launches_0_1024", "launches_32_256", "launches_32_0"]
    for figure in figures.values():
        assert len(figure["samples"]) == 2 and min(figure["samples"]) > 0


def test_interpreted_kernels_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main([]) == 1
    assert "TRITON_INTERPRET=1" in "".join(capsys.readouterr())
