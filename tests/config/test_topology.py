from pathlib import Path

import pytest

from tandem.config.topology import load_topology, parse_topology, topology_names
from tandem.runtime.errors import ConfigError

VALID = """\
roles:
  frontend:
  decode:
    count: 2
    gpu: [0, 1]
    config:
      engine.max_num_seqs: 8
config:
  disagg.policy: threshold
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


def test_every_bundled_topology_parses() -> None:
    counts = {
        name: [load_topology(name).count(role) for role in ("worker", "prefill", "decode")]
        for name in topology_names()
    }
    assert counts == {
        "aggregated": [0, 0, 1],
        "disagg-1p1d": [0, 1, 1],
        "disagg-2p2d": [0, 2, 2],
        "workers": [2, 0, 0],
    }


def test_a_file_gives_counts_gpus_and_overrides_with_their_lines(tmp_path: Path) -> None:
    path = write(tmp_path, VALID)
    topology = load_topology(str(path))
    decode = next(spec for spec in topology.roles if spec.role == "decode")
    assert (topology.name, decode.count, decode.gpus) == ("mine", 2, (0, 1))
    assert [(s.key, s.value, s.origin) for s in decode.settings] == [
        ("engine.max_num_seqs", 8, f"{path}:7")
    ]
    assert [(s.key, s.value) for s in topology.settings] == [("disagg.policy", "threshold")]


def test_an_unknown_topology_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean disagg-1p1d"):
        load_topology("disag-1p1d")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("count: 2", "count: two", r"mine.yaml:4: roles.decode.count = 'two'"),
        ("count: 2", "count: -1", r"roles.decode.count = -1: must be a whole number"),
        ("count: 2", "number: 2", r"mine.yaml:4: roles.decode.number: unknown key"),
        ("  decode:", "  decoder:", r"mine.yaml:3: unknown role decoder; did you mean decode"),
        ("gpu: [0, 1]", "gpu: [0]", r"mine.yaml:5: .*1 GPUs for count 2"),
        ("gpu: [0, 1]", "gpu: fast", r"must be auto, cpu, an index"),
        ("engine.max_num_seqs", "engine.max_num_seq", r"mine.yaml:7.*engine.max_num_seqs"),
        ("config:\n  disagg", "configs:\n  disagg", r"mine.yaml:8: unknown key configs"),
        ("  frontend:\n", "", r"roles.frontend.count must be 1"),
        ("count: 2\n    gpu: [0, 1]", "count: 0", r"roles.worker.count must be at least 1"),
        ("  frontend:\n", "  frontend:\n    gpu: 0\n", r"a frontend uses no GPU"),
    ],
)
def test_an_error_names_file_line_and_key(tmp_path: Path, old: str, new: str, reason: str) -> None:
    assert old in VALID
    with pytest.raises(ConfigError, match=reason):
        parse_topology(write(tmp_path, VALID.replace(old, new)))
