"""The costs of a fleet, measured on a small one."""

import json
from pathlib import Path

import pytest

from tandem.bench.stack.fleet import main


@pytest.mark.slow
def test_a_small_fleet_is_measured_and_a_lost_worker_fails_no_request(tmp_path: Path) -> None:
    output = tmp_path / "fleet.json"
    words = [
        "--workers",
        "2",
        "--frontends",
        "2",
        "--streams",
        "8",
        "--token-ms",
        "5",
        "--seconds",
        "1",
    ]
    main([*words, "--output", str(output)])
    figures = json.loads(output.read_text())["figures"]
    found = {name: figures[f"2_{name}"]["samples"] for name in ("etcd keys", "etcd watchers")}
    assert found == {"etcd keys": [2 * 2 + 2 + 1], "etcd watchers": [2 + 6 * 2]}
    assert figures["2_failed requests"]["samples"] == [0]
    assert figures["2_8 streams: tokens"]["samples"][0] > 0
