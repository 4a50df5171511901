import json
from pathlib import Path

import pytest

from tandem.bench.load.trace import TraceEntry
from tandem.bench.stack.kv_index import Fleet, main, replay, steps
from tandem.router.kv_index import KvIndex
from tandem.runtime.errors import ConfigError

FLEET = Fleet(num_instances=2, blocks_per_instance=12, split=2)


def trace(num_requests: int) -> list[TraceEntry]:
    """Conversations that grow by a block with each turn, and share their first block."""
    return [
        TraceEntry(
            float(number), 512, 1, (0, *(10 + number % 3 * 10 + i for i in range(number // 3)))
        )
        for number in range(num_requests)
    ]


def test_the_simulated_workers_hold_the_blocks_of_their_events() -> None:
    held: dict[str, set[bytes]] = {}
    looked_up = 0
    for step in steps(trace(24), FLEET):
        for instance_id, depth in step.expected.items():
            assert set(step.hashes[:depth]) <= held[instance_id]
            looked_up += depth
        mine = held.setdefault(step.event.instance_id, set())
        assert mine.isdisjoint(step.event.stored) and set(step.event.removed) <= mine
        mine -= set(step.event.removed)
        mine |= set(step.event.stored)
        assert len(mine) <= FLEET.blocks_per_instance
    assert looked_up > 0


@pytest.mark.parametrize("decoded", [False, True])
def test_a_replay_counts_its_blocks_and_finds_all(decoded: bool) -> None:
    whole = replay(trace(24), FLEET, 1000, decoded=decoded)
    assert whole.num_found == whole.num_expected > 0
    assert whole.num_blocks > whole.num_found and whole.blocks_per_s > 0
    bounded = replay(trace(24), FLEET, 6, decoded=decoded)
    assert bounded.num_found < whole.num_found


def test_an_index_that_matches_too_much_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvIndex, "match", lambda self, hashes: {f"{0:016x}": len(hashes)})
    for max_entries in (1000, 6):
        with pytest.raises(ConfigError, match="the workers hold"):
            replay(trace(24), FLEET, max_entries)


def test_the_command_measures_the_traces_of_a_folder(tmp_path: Path) -> None:
    lines = [
        json.dumps({name: getattr(entry, name) for name in TraceEntry.__struct_fields__})
        for entry in trace(24)
    ]
    (tmp_path / "small.jsonl").write_text("\n".join(lines))
    output = tmp_path / "out.json"
    few = ["--candidates", "3", "--choices", "40"]
    arguments = [str(tmp_path), "--rounds", "1", "--split", "2", *few, "--output", str(output)]
    assert main(arguments) == 0
    figures = json.loads(output.read_text())["figures"]
    for kind in ("index", "decoded", "bounded"):
        assert figures[f"small_{kind}_blocks_per_s"]["value"] > 0
    assert figures["small_index_found_percent"]["value"] == 100
    for kind in ("idle_index", "full_index"):
        choice_us = figures[f"small_{kind}_choice_us"]["value"]
        assert 0 < choice_us < figures[f"small_{kind}_request_us"]["value"]
    assert main([str(tmp_path / "none")]) == 1
