"""The router's own figures, by CPU time: its KV index over a trace, and its choice of a worker.

python -m tandem.bench.stack.kv_index FOLDER_OR_FILES_OF_MOONCAKE_TRACES --output kv_index.json
"""

import gc
import itertools
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tandem.bench.load.trace import TraceEntry, read_trace
from tandem.bench.report.figures import Figure, at_least
from tandem.bench.report.options import option, parse
from tandem.bench.report.program import run_program
from tandem.bench.stack import worker_choice
from tandem.bench.stack.worker_choice import measure_choices
from tandem.router.kv_index import KvIndex
from tandem.runtime.errors import ConfigError
from tandem.runtime.messages import KvEvent, encode

MODULE = "tandem.bench.stack.kv_index"
TARGET = at_least(5e6)
_BOUND = 0.25  # of the workers' blocks, in the bounded replay
_HASH_BYTES = 16
_decode_event = msgspec.msgpack.Decoder(KvEvent).decode

HOW = {
    "workers": "each keeps its least recently used blocks; a request goes where more than half of "
    "it lies, otherwise to the next in turn",
    "counted": "blocks stored, blocks removed, and blocks looked up until the first one that "
    "no worker holds; a block counts once per lookup, however many instances are asked",
    "index": "CPU time of KvIndex.match and KvIndex.apply; hashes are new objects every time, as "
    "they are off the wire",
    "probe": "one access to one instance's table: to look up a block that several instances hold "
    "takes one each",
    "decoded": "the same, with the events' decoding from msgpack",
    "bounded": f"the index may hold {_BOUND:g} of the blocks that the workers hold",
    "checked": "every match is compared with the simulated workers' own caches: equal, and never "
    "longer where the index is bounded",
    **worker_choice.HOW,
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """The simulated workers; a hash id of the trace stands for `split` blocks."""

    num_instances: int = 8
    blocks_per_instance: int = 10_000
    split: int = 1

    @property
    def instance_ids(self) -> list[str]:
        return [f"{number:016x}" for number in range(self.num_instances)]


@dataclass(frozen=True, slots=True)
class Options:
    """Measure the KV index's block operations per second of CPU time."""

    traces: tuple[Path, ...] = option((), "Mooncake traces, or folders of them", is_positional=True)
    instances: int = option(8, "workers", least=1)
    blocks: int = option(10_000, "blocks that a worker can hold", least=1)
    split: int = option(1, "blocks that a hash id stands for", least=1)
    rounds: int = option(3, "rounds, of which medians are shown", least=1)
    candidates: int = option(1000, "workers among which one is chosen", least=1)
    choices: int = option(20_000, "choices, for each kind of index", least=2)
    limit: int | None = option(None, "first requests of each trace", least=1)
    output: Path | None = option(None, "write everything as JSON")

    @property
    def fleet(self) -> Fleet:
        return Fleet(self.instances, self.blocks, self.split)


@dataclass(slots=True)
class _Worker:
    """A prefix cache of hash ids that forgets the least recently used."""

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
        """Compute a prompt; return the blocks that are new and those that were evicted."""
        stored = [hash_id for hash_id in ids if hash_id not in self.held]
        for hash_id in reversed(ids):
            self.held[hash_id] = None
            self.held.move_to_end(hash_id)
        gone = [self.held.popitem(last=False)[0] for _ in range(len(self.held) - self.capacity)]
        unreported = set(stored).difference(self.held)
        return (
            [each for each in stored if each not in unreported],
            [each for each in gone if each not in unreported],
        )


@dataclass(frozen=True, slots=True)
class Step:
    """A request: the hashes looked up, the expected matches, and the event of its worker."""

    hashes: list[bytes]
    expected: dict[str, int]
    event: KvEvent


@dataclass(slots=True)
class Replay:
    """The counts of a replay."""

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
    """Yield the trace's requests in order, with new hash objects in every message."""
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
    """Replay all requests against one index. Raises ConfigError when a match is wrong."""
    index = KvIndex(max_entries)
    prepared = list(steps(entries, fleet))
    events: Iterable[KvEvent] = [step.event for step in prepared]
    if decoded:
        events = map(_decode_event, [encode(event) for event in events])
    gc.freeze()  # a server has no such prepared objects to collect
    cpu_s, matches = _run(index, prepared, events)
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


def _run(
    index: KvIndex, batch: list[Step], events: Iterable[KvEvent]
) -> tuple[float, list[dict[str, int]]]:
    matches = []
    begun_s = time.process_time()
    for step, event in zip(batch, events, strict=True):
        matches.append(index.match(step.hashes))
        index.apply(event)
    return time.process_time() - begun_s, matches


def _check(step: Step, match: dict[str, int], is_bounded: bool) -> None:
    is_right = (
        all(depth <= step.expected.get(each, 0) for each, depth in match.items())
        if is_bounded
        else match == step.expected
    )
    if not is_right:
        raise ConfigError(f"the index matched {match}, the workers hold {step.expected}")


def measure(trace: str, entries: Sequence[TraceEntry], options: Options) -> Iterator[Figure]:
    """Yield the figures of each kind of replay."""
    fleet = options.fleet
    num_held = fleet.num_instances * fleet.blocks_per_instance
    kinds: dict[str, Callable[[], Replay]] = {
        "index": lambda: replay(entries, fleet, num_held),
        "decoded": lambda: replay(entries, fleet, num_held, decoded=True),
        "bounded": lambda: replay(entries, fleet, max(1, int(_BOUND * num_held))),
    }
    for kind, run in kinds.items():
        rounds = [run() for _ in range(options.rounds)]
        name, label = f"{trace}_{kind}", f"{trace}, {kind}"
        rates = tuple(each.blocks_per_s for each in rounds)
        blocks = (f"{rounds[0].num_blocks} blocks",)
        yield Figure(f"{name}_blocks_per_s", label, "1/s", rates, TARGET, notes=blocks)
        probes = tuple(each.ns_per_probe for each in rounds)
        yield Figure(f"{name}_ns_per_probe", "  per probe", "ns", probes)
        found = 100 * rounds[0].num_found / max(1, rounds[0].num_expected)
        yield Figure(f"{name}_found_percent", "  found", "%", (found,))


def _trace_files(paths: Sequence[Path]) -> list[Path]:
    files = [
        file
        for path in paths
        for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])
    ]
    if not files:
        raise ConfigError(f"no *.jsonl in {', '.join(map(str, paths))}")
    return files


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(Options, MODULE, arguments)

    async def all_figures(_: Path) -> list[Figure]:
        return [
            figure
            for file in _trace_files(options.traces)
            for entries in [read_trace(file, options.limit)]
            for figure in itertools.chain(
                measure(file.stem, entries, options),
                measure_choices(file.stem, entries, options.candidates, options.choices),
            )
        ]

    return run_program(MODULE, options, HOW, all_figures)


if __name__ == "__main__":
    sys.exit(main())
