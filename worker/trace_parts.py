"""A Chrome trace from the parts in which it was recorded, one after another."""

import json
from pathlib import Path


def joined_parts(parts: list[Path], path: Path) -> None:
    """Write the events of all parts to `path`, and remove the parts. Their clock is the same."""
    with path.open("w") as file:
        for part in parts:
            trace = json.loads(part.read_bytes())
            events = ",".join(map(json.dumps, trace.pop("traceEvents")))
            if part == parts[0]:
                file.write(json.dumps(trace)[:-1] + ', "traceEvents": [')
            elif events:
                file.write(",\n")
            file.write(events)
            part.unlink()
        file.write("]}")
