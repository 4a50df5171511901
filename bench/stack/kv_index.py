"""The KV index's own figures: a trace replayed over simulated workers, by CPU time.

python -m tandem.bench.stack.kv_index FOLDER_OR_FILES_OF_MOONCAKE_TRACES --output kv_index.json
"""

import gc
import statistics
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.bench.load.report import utc_now, write_document
from tandem.bench.load.trace import TraceEntry, read_trace
from tandem.bench.report.console import output_console
from tandem.router.kv_index import KvIndex
from tandem.runtime.errors import ConfigError, TandemError
from tandem.runtime.messages import KvEvent, encode

TARGET_BLOCKS_PER_S = 5e6
_BOUND = 0.25  # of the workers' blocks, in the bounded replay
_HASH_BYTES = 16
_decode_event = msgspec.msgpack.Decoder(KvEvent).decode

HOW = {
    "workers": "each keeps its least recently used blocks; a request goes where more than half of "
    "it lies, otherwise to the next in turn",
    "counted": "blocks stored, blocks removed, and blocks looked up until the first one that "
    "nobody holds; a block counts once per lookup, however many instances are asked",
    "index": "CPU time of KvIndex.match and KvIndex.apply; hashes are new objects every time, as "
    "they are off the wire",
    "probe": "one access to one instance's table: to look up a block that several instances hold "
    "takes one each",
    "decoded": "the same, with the events' decoding from msgpack",
    "bounded": f"the index may hold {_BOUND:g} of the blocks that the workers hold",
    "checked": "every match is compared with the simulated workers' own caches: equal, and never "
    "longer where the index is bounded",
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers that are simulated; a hash id of the trace stands for `split` blocks."""

    num_instances: int = 8
    blocks_per_instance: int = 10_000
    split: int = 1

    @property
    def instance_ids(self) -> list[str]:
        return [f"{number:016x}" for number in range(self.num_instances)]


@dataclass(slots=True)
class _Worker:
    """A prefix cache that forgets the least recently used; knows hash ids."""

    instance_id: str
    capacity: int
    event_id: int = 0
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def depth(self, ids: Sequence[int]) -> int:
        for depth, hash_id in enumerate(ids):
            if hash_id not in self.held:
                return depth
        return len(ids)

    def take(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Compute a prompt: which blocks are new, and which had to go."""
        stored = [hash_id for hash_id in ids if hash_id not in self.held]
        for hash_id in reversed(ids):
            self.held[hash_id] = None
            self.held.move_to_end(hash_id)
        gone = [self.held.popitem(last=False)[0] for _ in range(len(self.held) - self.capacity)]
        never_told = set(stored).difference(self.held)
        return (
            [each for each in stored if each not in never_told],
            [each for each in gone if each not in never_told],
        )


@dataclass(frozen=True, slots=True)
class Step:
    """A request: what is looked up, what should come out, and the event it leads to."""

    hashes: list[bytes]
    expected: dict[str, int]
    event: KvEvent


@dataclass(slots=True)
class Replay:
    """What a replay came to."""

    num_blocks: int = 0
    num_probes: int = 0  # of a table: lookups count once per instance
    cpu_s: float = 0.0
    num_found: int = 0  # blocks of the best match
    num_expected: int = 0  # as the workers' own caches have it

    @property
    def blocks_per_s(self) -> float:
        return self.num_blocks / max(self.cpu_s, 1e-9)

    @property
    def ns_per_probe(self) -> float:
        return self.cpu_s * 1e9 / max(self.num_probes, 1)


def steps(entries: Sequence[TraceEntry], fleet: Fleet) -> Iterator[Step]:
    """The trace's requests in order, with new hash objects in every message."""
    capacity = max(1, fleet.blocks_per_instance // fleet.split)
    workers = [_Worker(instance_id, capacity) for instance_id in fleet.instance_ids]
    for turn, entry in enumerate(entries):
        ids = list(dict.fromkeys(entry.hash_ids))
        depths = {worker.instance_id: worker.depth(ids) for worker in workers}
        worker = max(workers, key=lambda each: depths[each.instance_id])
        if 2 * depths[worker.instance_id] <= len(ids):
            worker = workers[turn % len(workers)]
        expected = {each: depth * fleet.split for each, depth in depths.items() if depth}
        stored, removed = worker.take(ids)
        worker.event_id += 1
        event = KvEvent(
            worker.instance_id,
            "e",
            worker.event_id,
            _hashes(stored, fleet.split),
            _hashes(removed, fleet.split),
        )
        yield Step(_hashes(ids, fleet.split), expected, event)


def _hashes(ids: Sequence[int], split: int) -> list[bytes]:
    return [
        (hash_id * split + part).to_bytes(_HASH_BYTES, "little")
        for hash_id in ids
        for part in range(split)
    ]


def replay(
    entries: Sequence[TraceEntry], fleet: Fleet, max_entries: int, *, decoded: bool = False
) -> Replay:
    """All requests against one index. Raises ConfigError where a match is not what it should be."""
    index = KvIndex(max_entries)
    prepared = list(steps(entries, fleet))
    payloads = [encode(step.event) for step in prepared] if decoded else []
    gc.freeze()  # what was prepared is no server's garbage to look through
    cpu_s, matches = _run_decoded(index, prepared, payloads) if decoded else _run(index, prepared)
    gc.unfreeze()
    if index.num_entries > max_entries:
        raise ConfigError(f"the index holds {index.num_entries} of {max_entries} entries")
    is_bounded = max_entries < fleet.num_instances * fleet.blocks_per_instance
    total = Replay(cpu_s=cpu_s)
    for step, match in zip(prepared, matches, strict=True):
        _check(step, match, is_bounded)
        longest = max(match.values(), default=0)
        num_looked_up = min(longest + 1, len(step.hashes))
        num_changed = len(step.event.stored) + len(step.event.removed)
        total.num_blocks += num_looked_up + num_changed
        total.num_probes += num_changed + sum(
            min(match.get(each, 0) + 1, len(step.hashes)) for each in fleet.instance_ids
        )
        total.num_found += longest
        total.num_expected += max(step.expected.values(), default=0)
    return total


def _run(index: KvIndex, batch: list[Step]) -> tuple[float, list[dict[str, int]]]:
    matches = []
    begun_s = time.process_time()
    for step in batch:
        matches.append(index.match(step.hashes))
        index.apply(step.event)
    return time.process_time() - begun_s, matches


def _run_decoded(
    index: KvIndex, batch: list[Step], payloads: list[bytes]
) -> tuple[float, list[dict[str, int]]]:
    matches = []
    begun_s = time.process_time()
    for step, payload in zip(batch, payloads, strict=True):
        matches.append(index.match(step.hashes))
        index.apply(_decode_event(payload))
    return time.process_time() - begun_s, matches


def _check(step: Step, match: dict[str, int], is_bounded: bool) -> None:
    is_right = (
        all(depth <= step.expected.get(each, 0) for each, depth in match.items())
        if is_bounded
        else match == step.expected
    )
    if not is_right:
        raise ConfigError(f"the index matched {match}, the workers hold {step.expected}")


def measure(entries: Sequence[TraceEntry], fleet: Fleet, num_rounds: int) -> dict[str, Any]:
    """Medians and rounds by kind of replay."""
    num_held = fleet.num_instances * fleet.blocks_per_instance
    bound = max(1, int(_BOUND * num_held))
    kinds = {
        "index": [replay(entries, fleet, num_held) for _ in range(num_rounds)],
        "decoded": [replay(entries, fleet, num_held, decoded=True) for _ in range(num_rounds)],
        "bounded": [replay(entries, fleet, bound) for _ in range(num_rounds)],
    }
    return {
        kind: {
            "blocks_per_s": statistics.median(each.blocks_per_s for each in rounds),
            "rounds": [each.blocks_per_s for each in rounds],
            "ns_per_probe": statistics.median(each.ns_per_probe for each in rounds),
            "num_blocks": rounds[0].num_blocks,
            "found": rounds[0].num_found / max(1, rounds[0].num_expected),
            "target": TARGET_BLOCKS_PER_S,
        }
        for kind, rounds in kinds.items()
    }


def print_results(console: Console, results: dict[str, Any]) -> None:
    """The table for docs and people."""
    table = Table("trace", "replay", "blocks/s", "met", "blocks", "ns/probe", "found", "rounds")
    for trace, kinds in results["traces"].items():
        for kind, figure in kinds.items():
            table.add_row(
                trace,
                kind,
                f"{figure['blocks_per_s']:.3g}",
                "yes" if figure["blocks_per_s"] >= figure["target"] else "[red]no[/]",
                str(figure["num_blocks"]),
                f"{figure['ns_per_probe']:.0f}",
                f"{figure['found']:.1%}",
                "  ".join(f"{value:.3g}" for value in figure["rounds"]),
            )
    console.print(table)
    for name, text in results["how"].items():
        console.print(f"  {name}: {text}", soft_wrap=True)


def _trace_files(paths: Sequence[Path]) -> list[Path]:
    files = [
        file
        for path in paths
        for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])
    ]
    if not files:
        raise ConfigError(f"no *.jsonl in {', '.join(map(str, paths))}")
    return files


def main(
    traces: Annotated[list[Path], typer.Argument(help="Mooncake traces, or folders of them")],
    instances: Annotated[int, typer.Option(min=1, help="workers")] = 8,
    blocks: Annotated[int, typer.Option(min=1, help="blocks that a worker can hold")] = 10_000,
    split: Annotated[int, typer.Option(min=1, help="blocks that a hash id stands for")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="rounds, of which medians are shown")] = 3,
    limit: Annotated[int | None, typer.Option(min=1, help="first requests of each trace")] = None,
    output: Annotated[Path | None, typer.Option(help="write everything as JSON")] = None,
) -> None:
    """Measure how many block operations the KV index does per second of CPU time."""
    started_at = utc_now()
    fleet = Fleet(instances, blocks, split)
    try:
        measured = {
            file.stem: measure(read_trace(file, limit), fleet, rounds)
            for file in _trace_files(traces)
        }
    except TandemError as error:
        Console(stderr=True, highlight=False).print(
            f"[red]error:[/] {escape(error.message)}", soft_wrap=True
        )
        raise typer.Exit(1) from error
    results = {"how": HOW, "traces": measured}
    print_results(output_console(), results)
    settings = {**msgspec.to_builtins(fleet), "rounds": rounds, "limit": limit}
    write_document(output, "tandem.bench.stack.kv_index", settings, started_at, results)


if __name__ == "__main__":
    typer.run(main)
