"""The bench of ranks on a CPU."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.bench.engine.ranks import MODULE


def figures(folder: Path, *arguments: str) -> dict[str, Any]:
    """Return the figures of a process of its own, which forks; 1: a target is missed."""
    path = folder / "ranks.json"
    command = [sys.executable, "-m", MODULE, "--output", str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode in (0, 1), done.stderr
    found = msgspec.json.decode(path.read_bytes())["figures"]
    return {figure["label"].strip(): figure["value"] for figure in found.values()}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_are_timed_beside_one_process(tmp_path: Path) -> None:
    found = figures(tmp_path, "--rounds", "1")
    assert 0 < found["10th percentile"] <= found["step message, 256 running"]
    assert {"sum of two ranks, 4 KiB", "prompt, own order"} <= found.keys()
    for step in ("decode step, 1 answer", "decode step, 8 answers"):
        assert found[f"{step}, two threads"] > 0 and found[f"{step}, two ranks"] > 0
