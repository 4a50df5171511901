"""The bench of an SDK worker, with few requests."""

from pathlib import Path

import pytest

import tandem.bench.stack.runtime as bench
from tandem.bench.stack.__main__ import results_json
from tandem.runtime.config import RuntimeConfig


async def test_a_round_measures_every_figure_that_has_a_target(
    runtime_config: RuntimeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("NUM_WARM_UP", 2),
        ("NUM_LATENCIES", 20),
        ("NUM_REQUESTS", 50),
        ("STREAM_ITEMS", 10),
    ):
        monkeypatch.setattr(bench, name, value)
    figures = await bench.measure_round(runtime_config, tmp_path / "worker.log")
    assert figures.keys() == bench.TARGETS.keys()
    assert 0 < figures["p50_ms"] <= figures["p99_ms"]
    assert figures["requests_per_s"] > 0 and figures["items_per_s"] > 0
    results = results_json([figures], bench.TARGETS, bench.HOW)
    assert results["figures"]["requests_per_s"]["median"] == figures["requests_per_s"]
