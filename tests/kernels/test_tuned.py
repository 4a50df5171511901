"""The table of tuned configurations: who gets which line."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch

from tandem.kernels import tuned
from tandem.kernels.attention.decode import PagedAttentionConfig
from tandem.kernels.attention.prefill import PrefillAttentionConfig
from tandem.kernels.linear.launch import LinearConfig

CONFIGS = {
    "linear": LinearConfig,
    "paged_attention": PagedAttentionConfig,
    "prefill_attention": PrefillAttentionConfig,
}


@dataclass(frozen=True)
class Config:
    tile: int
    num_warps: int = 4


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"tile": 64, "num_warps": 8}
    rows = {"sm_80": {"a": {"size=4": {"tile": 32}}}, "sm_90": {"a": {"size=4 bytes=2": line}}}
    monkeypatch.setattr(tuned, "_table", lambda: rows)


@pytest.mark.parametrize(
    ("arch", "shape", "expected"),
    [
        (90, {"size": 4, "bytes": 2}, Config(64, 8)),
        (100, {"size": 4, "bytes": 2}, Config(64, 8)),  # of the newest chip below it
        (86, {"size": 4}, Config(32)),
        (90, {"size": 4}, Config(7)),  # another chip's line is no use
        (75, {"size": 4}, Config(7)),
        (tuned.INTERPRETED, {"size": 4, "bytes": 2}, Config(7)),
    ],
)
def test_a_launch_gets_the_line_of_its_chip_and_shape_or_the_default(
    table: None, monkeypatch: pytest.MonkeyPatch, arch: int, shape: dict[str, int], expected: Config
) -> None:
    monkeypatch.setattr(tuned, "architecture", lambda: arch)
    assert tuned.tuned_config(Config(7), "a", **shape) == expected
    assert tuned.tuned_config(Config(7), "another", **shape) == Config(7)


def test_every_committed_line_is_a_configuration_of_its_kernel() -> None:
    lines = [
        (kernel, row)
        for kernels in json.loads(tuned.TABLE.read_text()).values()
        for kernel, rows in kernels.items()
        for row in rows.values()
    ]
    assert lines
    for kernel, row in lines:
        assert asdict(CONFIGS[kernel](**row)) == row


def test_another_table_is_read_while_a_tuning_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Families that are tuned later build on what the earlier ones found."""
    path = tmp_path / "table.json"
    path.write_text('{"sm_90": {"a": {"size=4": {"tile": 3}}}}')
    monkeypatch.setenv(tuned.TABLE_VARIABLE, str(path))
    monkeypatch.setattr(tuned, "_table", tuned._table.__wrapped__)  # without its cache
    assert tuned.table_entry(90, "a", size=4) == {"tile": 3}


def test_a_chip_that_is_not_here_has_the_multiprocessors_of_its_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = []
    for arch in (80, 89, 90, 103):
        monkeypatch.setattr(tuned, "architecture", lambda arch=arch: arch)
        counts.append(tuned.num_multiprocessors(torch.device("meta")))
    assert counts == [108, 108, 132, 148]


def test_no_build_cuts_contexts_by_the_number_of_heads() -> None:
    """Ranks have a share of the heads each, and the bits of one process."""
    lines = json.loads(tuned.TABLE.read_text())
    assert not any(
        line["fills_alone"] for chip in lines.values() for line in chip["paged_attention"].values()
    )
