"""The sections of the handoff on one GPU, each in a process of its own.

They run on host memory too, where the numbers mean nothing.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable

import msgspec
import torch

from tandem.bench.handoff.end import PoolShape
from tandem.bench.handoff.plan import Plan
from tandem.bench.handoff.wire import Wire, adjacent, check_arrival, timed, wire
from tandem.bench.handoff.wire_figures import measure_wire, wire_figures
from tandem.bench.kernels.cases import make_sample
from tandem.bench.report.figures import Figure, at_least, at_most
from tandem.bench.report.setting import Setting
from tandem.engine.schedule.sequence import layer_boundaries
from tandem.transfer.agents.group import WriteOrder
from tandem.transfer.agents.link import GROUP_COUNTS
from tandem.transfer.agents.reactor import HELLO

# The KV of an 8-billion-parameter model with 36 layers, in bfloat16: 9 MiB per block.
MODEL_SHAPE = PoolShape(
    num_blocks=128, num_layers=36, num_kv_heads=8, head_dim=128, block_size=64, dtype="bfloat16"
)
MODEL_FLOPS_PER_TOKEN = 2 * 8.2e9
TINY_SHAPE = PoolShape(num_blocks=64, num_layers=4, num_kv_heads=2, head_dim=16, dtype="bfloat16")
PAYLOAD_TARGET = at_least(0.9, of="share")  # of a copy in the same run
MAX_ROUNDS = 5
MATRIX_SIZES = 4096, 64  # on a GPU, and in a dry run


def shape_for(setting: Setting, num_blocks: int | None = None) -> PoolShape:
    """Return the KV of a real model's prompt, or of so many blocks; a tiny one for a dry run."""
    shape = TINY_SHAPE if setting.is_dry else MODEL_SHAPE
    if num_blocks is not None and not (setting.is_dry and num_blocks > shape.num_blocks):
        shape = msgspec.structs.replace(shape, num_blocks=num_blocks)
    return msgspec.structs.replace(shape, device=str(setting.device))


def _num_rounds(setting: Setting) -> int:
    return min(MAX_ROUNDS, setting.rounds)


async def transfers(setting: Setting) -> AsyncIterator[Figure]:
    """Measure writes and round trips between two workers' pools, and the workers' own probe."""
    plan = Plan(
        rounds=_num_rounds(setting),
        num_batches=1,
        num_writes=setting.size(10, 2),
        num_pings=setting.size(500, 20),
        rest_s=0.2 if setting.is_dry else 3.0,
        shape=shape_for(setting),
    )
    async with wire(plan.shape) as between:
        for figure in await _link_probe(between):
            yield figure
        for figure in wire_figures(plan, await measure_wire(between, plan), PAYLOAD_TARGET):
            yield figure


async def _link_probe(between: Wire) -> list[Figure]:
    """Return the rates that workers measure when they connect."""
    group, link = between.end.group, between.link
    await group.prepare(link, (max(1, group.layout.num_layers // 2), group.layout.num_layers))
    await group.measure(link)
    rates = link.rates
    if rates is None:
        return []
    return [
        Figure("probe_tb_s", "link probe: wire", "TB/s", (rates.wire_bytes_per_s / 1e12,)),
        Figure("probe_overhead_us", "link probe: a write", "us", (rates.overhead_s * 1e6,)),
    ]


async def checksums(setting: Setting) -> AsyncIterator[Figure]:
    """Measure a handoff's verification by the agents, and its share."""
    shape = shape_for(setting)
    async with wire(shape) as between:
        group, blocks = between.end.group, list(range(shape.num_blocks))
        (ranks,), layers = group.layout.rank_pairs_from(1), range(group.layout.num_layers)
        count = _num_rounds(setting) * setting.size(10, 2)
        samples = [await timed(group.checksums(ranks, layers, blocks)) for _ in range(count)]
    size = setting.size(*MATRIX_SIZES)
    matmul = _matmul(setting)
    matmul()
    sample, _ = make_sample([matmul], setting)
    matmul_s = statistics.median(sample() for _ in range(setting.size(20, 3)))
    flops = MODEL_FLOPS_PER_TOKEN * shape.num_blocks * shape.block_size
    prefill_s = flops / (2 * size**3 / matmul_s)
    asked_s = statistics.median(samples)
    label = "  of an 8B prefill of these tokens at the matmul rate"
    share = (100 * asked_s / prefill_s,)
    yield Figure("checksum_ms", f"checksums of {len(blocks)} blocks", "ms", (asked_s * 1e3,))
    yield Figure("verification_percent", label, "%", share, at_most(1.0))


async def streaming(setting: Setting) -> AsyncIterator[Figure]:
    """Measure the exposed part of a step's KV whose layers are delivered in groups."""
    shape = shape_for(setting)
    counts = [count for count in GROUP_COUNTS if count <= shape.num_layers]
    async with wire(shape) as between:
        for count in counts:
            ends = layer_boundaries(shape.num_layers, count)
            await between.end.group.prepare(between.link, ends)
        for num_blocks in (shape.num_blocks // 32, shape.num_blocks // 4):
            found: dict[int, list[float]] = {count: [] for count in counts}
            for _ in range(_num_rounds(setting) * setting.size(10, 2)):
                for count in counts:
                    found[count].append(await _deliver(between, setting, num_blocks, count))
            for count, exposed_s in found.items():
                await _deliver(between, setting, num_blocks, count)
                await check_arrival(between, adjacent(num_blocks))
                name = f"exposed_{num_blocks}_blocks_{count}_groups_ms"
                label = f"exposed, {num_blocks} blocks in {count} groups of layers"
                yield Figure(name, label, "ms", (statistics.median(exposed_s) * 1e3,))


async def _deliver(between: Wire, setting: Setting, num_blocks: int, num_groups: int) -> float:
    """Return the seconds from the end of a made-up step until its KV is at the far end."""
    group, pairs = between.end.group, adjacent(num_blocks)
    num_layers = group.layout.num_layers
    (ranks,) = between.link.rank_pairs
    ends = layer_boundaries(num_layers, num_groups)
    compute = _matmul(setting)
    pool = between.end.kv.tensor
    stream_of_step = None if setting.is_dry else torch.cuda.Stream(setting.device)  # type: ignore[no-untyped-call]

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
        for index in range(num_layers):
            event = await asyncio.to_thread(layer, index)
            if index + 1 in ends:
                order = WriteOrder(
                    ranks,
                    range(begin, index + 1),
                    pairs,
                    lambda _: HELLO,
                    boundaries=ends,
                    after=event,
                )
                writes.append(asyncio.create_task(group.write(between.link, order)))
                begin = index + 1
        if event is not None:
            await asyncio.to_thread(event.synchronize)
        computed_at = time.perf_counter()
        await asyncio.gather(*writes)
        return time.perf_counter() - computed_at


def _matmul(setting: Setting) -> Callable[[], object]:
    size = setting.size(*MATRIX_SIZES)
    a, b = (torch.randn(size, size, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    return lambda: torch.matmul(a, b)
