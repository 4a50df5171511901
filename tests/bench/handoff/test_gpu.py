from pathlib import Path

import msgspec
import pytest
import torch

from tandem.bench.handoff.gpu import (
    SECTIONS,
    default_output,
    main,
    setting_for,
    shares_of_the_copy,
)
from tandem.bench.report.figures import Figure


@pytest.fixture
def only_two_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [each for each in SECTIONS if each.name in ("ceilings", "streaming")]
    monkeypatch.setattr("tandem.bench.handoff.gpu.SECTIONS", few)


@pytest.mark.usefixtures("only_two_sections")
def test_a_dry_run_on_host_memory_writes_figures_of_every_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results" / "handoff.json"
    code = main(["--device", "cpu", "--output", str(path), "--commit", "abc"])
    whole = msgspec.json.decode(path.read_bytes())
    assert (code, whole["failures"]) == (0, {})
    assert whole["commit"] == "abc"
    assert whole["command"][-1] == "abc"
    figures = whole["figures"]
    assert figures["copy_tb_s"]["value"] > 0
    assert figures["exposed_16_blocks_4_groups_ms"]["value"] >= 0
    assert all(not each["verdict"] for each in figures.values()), "a dry run judges nothing"
    assert str(path) in capsys.readouterr().out


def test_a_section_that_fails_leaves_the_others_their_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [each for each in SECTIONS if each.name == "ceilings"]
    monkeypatch.setattr("tandem.bench.handoff.gpu.SECTIONS", few)
    monkeypatch.setattr("tandem.bench.handoff.gpu.SECTION_TIMEOUT_S", 0.01)
    path = tmp_path / "handoff.json"
    assert main(["--device", "cpu", "--output", str(path)]) == 1
    assert "ceilings" in msgspec.json.decode(path.read_bytes())["failures"]


def test_a_gpu_is_judged_on_whole_prompts_of_a_real_models_kv() -> None:
    setting = setting_for("cuda:0", "engine")
    assert not setting.is_dry
    assert setting.limit(1.5) == 1.5
    assert setting.shape.block_bytes * setting.shape.num_blocks > 2**30
    assert setting_for("cuda:0", "expandable").shape.allocator == "torch"


def test_transfers_are_held_against_the_copies_of_the_same_run() -> None:
    figures = [
        Figure("copy_tb_s", "copy", "TB/s", (2.0,)),
        Figure("engine_whole_agents_tb_s", "engine", "TB/s", (1.5, 1.6)),
        Figure("engine_part_agents_tb_s", "engine", "TB/s", (1.0,)),
    ]
    (share,) = shares_of_the_copy(figures)
    assert share.rounds == (0.75, 0.8)


def test_results_lie_in_a_folder_named_after_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    path = default_output("cuda:0")
    assert path.parts[-4:] == ("bench", "results", "nvidia-h200", "handoff.json")
