from pathlib import Path

import msgspec
import pytest

from tandem.bench.handoff.gpu import main
from tandem.bench.handoff.gpu_sections import shape_for
from tandem.bench.report.setting import setting_for


@pytest.mark.slow
def test_a_dry_run_on_host_memory_writes_figures_of_its_sections(tmp_path: Path) -> None:
    path = tmp_path / "results" / "handoff.json"
    sections = ["--only", "ceilings", "transfers", "streaming"]
    code = main(["--device", "cpu", "--output", str(path), "--commit", "abc", *sections])
    whole = msgspec.json.decode(path.read_bytes())
    assert (code, whole["failures"]) == (0, {})
    figures = whole["figures"]
    assert figures["exposed_16_blocks_4_groups_ms"]["value"] >= 0
    assert all(not each["verdict"] for each in figures.values()), "a dry run judges nothing"
    # a write reads and writes each byte, as a copy does
    write = figures["bandwidth_whole_agents_rate"]
    assert write["ceiling"] == pytest.approx(whole["ceilings_per_s"]["copy"] / 2 / 1e9)
    assert write["share"] == pytest.approx(write["value"] / write["ceiling"])


def test_a_gpu_is_measured_with_whole_prompts_of_a_real_models_kv() -> None:
    shape = shape_for(setting_for("cuda:0"))
    assert shape.block_bytes * shape.num_blocks > 2**30
