import json
from pathlib import Path

import msgspec

from tandem.bench.load.trace import TraceEntry
from tandem.bench.stack.worker_choice import main


def test_the_command_measures_the_choices_of_a_trace(tmp_path: Path) -> None:
    """Conversations that grow by a block with each turn, and share their first block."""
    entries = [
        TraceEntry(float(n), 512, 1, (0, *(10 + n % 3 * 10 + i for i in range(n // 3))))
        for n in range(24)
    ]
    trace, output = tmp_path / "small.jsonl", tmp_path / "out.json"
    trace.write_text("\n".join(json.dumps(msgspec.to_builtins(each)) for each in entries))
    arguments = [str(trace), "--candidates", "20", "--choices", "40", "--output", str(output)]
    assert main(arguments) == 0
    figures = json.loads(output.read_text())["figures"]
    for kind in ("idle_index", "full_index"):
        choice_us = figures[f"small_{kind}_choice_us"]["value"]
        assert 0 < choice_us < figures[f"small_{kind}_request_us"]["value"]
    assert main([str(tmp_path / "none")]) == 1
