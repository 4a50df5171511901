"""The topology file of every layout."""

from pathlib import Path

import pytest

from tandem.config.topology import parse_topology
from tandem.launch.simulation.layout import layouts_of


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_tandem_serve_reads_the_topology_of_every_layout(num_workers: int, tmp_path: Path) -> None:
    for layout in layouts_of(num_workers):
        path = tmp_path / "plan.yaml"
        path.write_text(layout.topology({"disagg.ttft_target_ms": 300.0}))
        topology = parse_topology(path)
        counts = [topology.count(role) for role in ("worker", "decode", "prefill")]
        assert counts == [layout.roles.count(role) for role in ("both", "decode", "prefill")]
        settings = {setting.key: setting.value for setting in topology.settings}
        assert settings.pop("disagg.ttft_target_ms") == 300.0
        expected = {"disagg.policy": "always_local"} if layout.name == "unsplit" else {}
        assert settings == expected


def test_the_layouts_are_unsplit_every_split_and_both_roles() -> None:
    names = [layout.name for layout in layouts_of(4)]
    assert names == ["unsplit", "1P 3D", "2P 2D", "3P 1D", "workers"]
    assert all(len(layout.roles) == 4 for layout in layouts_of(4))
