"""The bench of an SDK worker, with few requests."""

from pathlib import Path

import pytest

import tandem.bench.stack.runtime as bench
from tandem.runtime.config import RuntimeConfig


async def test_a_round_measures_every_figure(
    runtime_config: RuntimeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("NUM_WARM_UP", 2),
        ("NUM_LATENCIES", 20),
        ("NUM_REQUESTS", 50),
        ("STREAM_ITEMS", 10),
    ):
        monkeypatch.setattr(bench, name, value)
    values = await bench.measure_round(runtime_config, tmp_path)
    assert values.keys() == {figure.name for figure in bench.FIGURES}
    assert 0 < values["p50_ms"] <= values["p99_ms"]
    assert values["requests_per_s"] > 0 and values["items_per_s"] > 0
