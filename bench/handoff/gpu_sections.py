"""What `gpu_handoff` measures, each section in a process of its own.

Runs on host memory too, where the numbers mean nothing and the course is the same.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tandem.bench.handoff.end import PoolShape
from tandem.bench.handoff.peer import Rest
from tandem.bench.handoff.wire import (
    AGENTS,
    BARE,
    CHECKED,
    LOOPS,
    PAUSING,
    Pairs,
    Wire,
    adjacent,
    check_arrival,
    in_runs,
    time_loop_round_trips,
    time_round_trips,
    time_writes,
    wire,
)
from tandem.bench.report.figures import Figure, flat, medians, percentile, ratio_interval
from tandem.engine.schedule.sequence import layer_boundaries
from tandem.transfer.link import GROUP_COUNTS
from tandem.transfer.reactor import HELLO

# The KV of an 8-billion-parameter model with 36 layers, in bfloat16: 2.25 MiB per block.
MODEL_SHAPE = PoolShape(
    num_blocks=512, num_layers=36, num_kv_heads=8, head_dim=128, dtype="bfloat16"
)
MODEL_FLOPS_PER_TOKEN = 2 * 8.2e9
TINY_SHAPE = PoolShape(num_blocks=64, num_layers=4, num_kv_heads=2, head_dim=16, dtype="bfloat16")
PAYLOAD_TARGET_TB_S = 1.5  # of an H200, whose copies read and write at twice that and more
SLOW_WRITE_S = 0.5  # a way that is this slow is clear after a few writes


@dataclass(frozen=True, slots=True)
class Setting:
    """Where to measure, and how much."""

    shape: PoolShape
    rounds: int
    num_writes: int
    num_pings: int
    matrix_size: int
    is_dry: bool  # host memory, or a run that only shows that all of it runs

    @property
    def device(self) -> torch.device:
        return torch.device(self.shape.device)

    def limit(self, value: float) -> float | None:
        """A target, where the number means something."""
        return None if self.is_dry else value


def measure_ceilings(setting: Setting) -> list[Figure]:
    """What the device gives to plain operations of torch, in the same minutes."""
    device, num_bytes = setting.device, (1 << 20) if setting.is_dry else (4 << 30)
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    size = setting.matrix_size
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    words = source.view(torch.float32)
    copy_s = _device_samples(setting, lambda: target.copy_(source))
    read_s = _device_samples(setting, lambda: torch.amax(words))
    matmul_s = _device_samples(setting, lambda: torch.matmul(a, b))
    return [
        Figure("copy_tb_s", "copy, payload", "TB/s", (num_bytes / copy_s / 1e12,)),
        Figure("read_tb_s", "read", "TB/s", (num_bytes / read_s / 1e12,)),
        Figure("matmul_tflop_s", "bf16 matmul", "TFLOP/s", (2 * size**3 / matmul_s / 1e12,)),
    ]


async def measure_transfers(setting: Setting, allocator: str) -> list[Figure]:
    """WRITE bandwidth between two processes, by our agents and by the bare library in turns."""
    whole = setting.shape.num_blocks
    cases: dict[str, Pairs] = {
        "whole": adjacent(whole),
        "runs": in_runs(whole, 16),
        "part": adjacent(whole // 8),
        "small": adjacent(whole // 32),
    }
    figures: list[Figure] = []
    async with wire(setting.shape) as between:
        for case, pairs in cases.items():
            figures += await _bandwidth(between, setting, allocator, case, pairs)
        if allocator == "engine":
            figures += await _round_trips(between, setting)
            figures += await _self_test(between)
    return figures


async def _bandwidth(
    between: Wire, setting: Setting, allocator: str, case: str, pairs: Pairs
) -> list[Figure]:
    samples: dict[str, list[list[float]]] = {BARE: [], PAUSING: [], AGENTS: [], CHECKED: []}
    for _ in range(setting.rounds):
        for how, rounds in samples.items():
            first = await time_writes(between, pairs, how, 1)  # faults in, opens the way
            count = 1 if first[0] > SLOW_WRITE_S else setting.num_writes
            rounds.append(await time_writes(between, pairs, how, count))
    await check_arrival(between, pairs)
    num_bytes = len(pairs) * setting.shape.block_bytes
    label = f"{allocator}: {len(pairs)} blocks, {case}, {num_bytes >> 10} KiB"
    figures = []
    for how, rounds in samples.items():
        rates = tuple(num_bytes / each / 1e12 for each in medians(rounds))
        is_judged = how == AGENTS and case in ("whole", "runs") and allocator == "engine"
        limit = setting.limit(PAYLOAD_TARGET_TB_S) if is_judged else None
        name = f"{allocator}_{case}_{how.replace(',', '').replace(' ', '_')}_tb_s"
        figures.append(Figure(name, f"{label}, {how}", "TB/s", rates, limit, "at least"))
    ours = samples[AGENTS]
    bare = min(
        (samples[BARE], samples[PAUSING]), key=lambda rounds: statistics.median(flat(rounds))
    )
    ratios = tuple(b / a for a, b in zip(medians(ours), medians(bare), strict=True))
    figures.append(
        Figure(
            f"{allocator}_{case}_ratio",
            "  agents / bare library",
            "",
            ratios,
            setting.limit(0.95) if allocator == "engine" and case in ("whole", "runs") else None,
            "at least",
            ratio_interval(flat(bare), flat(ours)),
        )
    )
    return figures


async def _round_trips(between: Wire, setting: Setting) -> list[Figure]:
    trips = {
        how: [
            await time_round_trips(between, setting.num_pings, bare=how == BARE)
            for _ in range(setting.rounds)
        ]
        for how in (BARE, AGENTS)
    }
    trips[LOOPS] = [
        await time_loop_round_trips(between, setting.num_pings) for _ in range(setting.rounds)
    ]
    figures = []
    for how, rounds in trips.items():
        name, limit = how.replace(" ", "_"), setting.limit(50.0) if how == LOOPS else None
        p50 = tuple(1e6 * each for each in medians(rounds))
        p99 = tuple(1e6 * percentile(each, 0.99) for each in rounds)
        figures += [
            Figure(f"round_trip_{name}_p50_us", f"round trip, {how}, p50", "us", p50, limit),
            Figure(f"round_trip_{name}_p99_us", f"round trip, {how}, p99", "us", p99),
        ]
    idle = await between.peer.ask(Rest(0.2 if setting.is_dry else 3.0))
    share = (100 * idle.share,)
    figures.append(Figure("agent_idle_percent", "agent at rest", "%", share, setting.limit(5.0)))
    return figures


async def _self_test(between: Wire) -> list[Figure]:
    """What workers would find out when they meet."""
    group, link = between.end.group, between.link
    await group.prepare(link, (max(1, group.layout.num_layers // 2), group.layout.num_layers))
    await group.measure(link)
    rates = link.rates
    if rates is None:
        return []
    return [
        Figure("self_test_tb_s", "self-test: wire", "TB/s", (rates.wire_bytes_per_s / 1e12,)),
        Figure("self_test_overhead_us", "self-test: a write", "us", (rates.overhead_s * 1e6,)),
    ]


async def measure_checksums(setting: Setting) -> list[Figure]:
    """The kernel alone, a handoff's verification as the agents ask for it, and its share."""
    figures: list[Figure] = []
    async with wire(setting.shape) as between:
        group, blocks = between.end.group, list(range(setting.shape.num_blocks))
        (stream,), layers = group.streams_from(1), range(group.layout.num_layers)
        num_bytes = len(blocks) * setting.shape.block_bytes
        samples = []
        for _ in range(setting.rounds * setting.num_writes):
            started_at = time.perf_counter()
            await group.checksums(stream, layers, blocks)
            samples.append(time.perf_counter() - started_at)
        asked_s = statistics.median(samples)
        kernel_s = _kernel_s(setting, between.end.kv.tensor, len(blocks))
    matmul_s = _device_samples(setting, _matmul(setting))
    flops = MODEL_FLOPS_PER_TOKEN * len(blocks) * setting.shape.block_size
    prefill_s = flops / (2 * setting.matrix_size**3 / matmul_s)
    if kernel_s is not None:
        figures.append(
            Figure(
                "checksum_kernel_tb_s", "checksum kernel", "TB/s", (num_bytes / kernel_s / 1e12,)
            )
        )
    return [
        *figures,
        Figure("checksum_ms", f"checksums of {len(blocks)} blocks, asked", "ms", (asked_s * 1e3,)),
        Figure(
            "verification_percent",
            "  of an 8B prefill of these tokens at the matmul ceiling",
            "%",
            (100 * asked_s / prefill_s,),
            setting.limit(1.0),
        ),
    ]


def _kernel_s(setting: Setting, pool: torch.Tensor, num_blocks: int) -> float | None:
    if setting.device.type != "cuda":
        return None
    # Imported here: without a GPU there may be no Triton.
    from tandem.kernels.checksum import block_checksums, part_table

    words = pool.view(len(pool), -1).view(torch.int32)
    ids = torch.arange(num_blocks, device=pool.device)
    table = part_table([(0, words.shape[1])], pool.device)
    out = torch.empty(num_blocks, dtype=torch.int64, device=pool.device)
    return _device_samples(setting, lambda: block_checksums(words, ids, table, out))


async def measure_streaming(setting: Setting) -> list[Figure]:
    """What is exposed of the KV of a step whose layers are delivered in groups as they come."""
    figures: list[Figure] = []
    counts = [count for count in GROUP_COUNTS if count <= setting.shape.num_layers]
    async with wire(setting.shape) as between:
        for count in counts:
            ends = layer_boundaries(setting.shape.num_layers, count)
            await between.end.group.prepare(between.link, ends)
        for num_blocks in (setting.shape.num_blocks // 32, setting.shape.num_blocks // 4):
            found: dict[int, list[float]] = {count: [] for count in counts}
            for _ in range(setting.rounds * setting.num_writes):
                for count in counts:
                    found[count].append(await _deliver(between, setting, num_blocks, count))
            for count, exposed_s in found.items():
                await _deliver(between, setting, num_blocks, count)
                await check_arrival(between, adjacent(num_blocks))
                name = f"exposed_{num_blocks}_blocks_{count}_groups_ms"
                label = f"exposed, {num_blocks} blocks in {count} groups of layers"
                figures.append(Figure(name, label, "ms", (statistics.median(exposed_s) * 1e3,)))
    return figures


async def _deliver(between: Wire, setting: Setting, num_blocks: int, num_groups: int) -> float:
    """Seconds from the end of a made-up step until its KV is at the far end."""
    group, pairs = between.end.group, adjacent(num_blocks)
    (stream,) = between.link.streams
    ends = layer_boundaries(setting.shape.num_layers, num_groups)
    compute = _matmul(setting)
    pool = between.end.kv.tensor
    stream_of_step = _stream(setting.device)

    def layer(index: int) -> "torch.cuda.Event | None":
        with torch.cuda.stream(stream_of_step):
            compute()
            pool[:num_blocks, index].normal_()
            if stream_of_step is None:
                return None
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream_of_step)
            return event

    async with between.expecting():
        writes, begin, event = [], 0, None
        for index in range(setting.shape.num_layers):
            event = await asyncio.to_thread(layer, index)
            if index + 1 in ends:
                writing = group.write(
                    between.link,
                    stream,
                    range(begin, index + 1),
                    pairs,
                    lambda _: HELLO,
                    boundaries=ends,
                    after=event,
                )
                writes.append(asyncio.create_task(writing))
                begin = index + 1
        if event is not None:
            await asyncio.to_thread(event.synchronize)
        computed_at = time.perf_counter()
        await asyncio.gather(*writes)
        return time.perf_counter() - computed_at


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _matmul(setting: Setting) -> Callable[[], object]:
    size = setting.matrix_size
    a, b = (torch.randn(size, size, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    return lambda: torch.matmul(a, b)


def _device_samples(setting: Setting, call: Callable[[], object]) -> float:
    """Median seconds of a call on the device, by events where it has them."""
    for _ in range(3):
        call()
    samples: Sequence[float] = [
        _event_s(call) if setting.device.type == "cuda" else _wall_s(call)
        for _ in range(3 if setting.is_dry else 20)
    ]
    return statistics.median(samples)


def _event_s(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _wall_s(call: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    call()
    return time.perf_counter() - started_at
