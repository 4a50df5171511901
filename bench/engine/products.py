"""Decode steps by cuBLAS's products and by fused ones, in turns and over the same weights."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product

from tandem.bench.engine.decode import Point, measure
from tandem.bench.engine.floors import decode_bytes
from tandem.bench.engine.rig import Rig, StepRecord, Workshop, host_s, intervals_s
from tandem.bench.engine.setting import num_rounds
from tandem.bench.report.figures import Bound, Figure, in_unit
from tandem.bench.report.setting import Setting

# name |-> options of the engine
VARIANTS: Mapping[str, Mapping[str, bool]] = {
    "cublas": {},
    "cublas_early": {"dependent_launch": True},
    "fused": {"fused_products": True},
    "fused_early": {"fused_products": True, "dependent_launch": True},
}
NUM_SEQS = (1, 16)
ALL_SLOTS = 256 * 1024  # of all pools, so that they fit beside one set of weights


@dataclass(slots=True)
class Variant:
    """An engine with its options, and its rounds of steps by the number of sequences."""

    name: str
    rig: Rig
    rounds: dict[int, list[list[StepRecord]]] = field(default_factory=dict)


def run(setting: Setting) -> Iterator[Figure]:
    """Measure every variant in every round."""
    context, num_steps = setting.size(1024, 32), setting.size(96, 4)
    points = [Point(setting.size(count, min(count, 2)), context) for count in NUM_SEQS]
    workshop = Workshop(setting)
    num_blocks = None if setting.is_dry else ALL_SLOTS // len(VARIANTS) // 64
    max_num_seqs = points[-1].num_seqs
    variants = [
        Variant(name, workshop.rig(max_num_seqs=max_num_seqs, num_blocks=num_blocks, **options))
        for name, options in VARIANTS.items()
    ]
    for index in range(setting.num_warmups + num_rounds(setting)):
        for point, variant in product(points, variants):
            records = measure(variant.rig, point, num_steps)
            if index >= setting.num_warmups:
                variant.rounds.setdefault(point.num_seqs, []).append(records)
    for point, variant in product(points, variants):
        yield from _figures(point, variant)


def _figures(point: Point, variant: Variant) -> Iterator[Figure]:
    rounds = variant.rounds[point.num_seqs]
    name, label = f"{point.name}_{variant.name}", variant.name
    device_s = [statistics.median(each.device_s for each in steps) for steps in rounds]
    floor = Bound("read", decode_bytes(variant.rig.model, point.num_seqs * point.context))
    yield Figure(name, f"{point.label}, {label}", "ms", in_unit(device_s, "ms"), bound=floor)
    yield Figure(
        f"{name}_step",
        f"  from tokens to tokens, {label}",
        "ms",
        in_unit((statistics.median(intervals_s(steps)) for steps in rounds), "ms"),
        ceiling=1e3 * statistics.median(device_s),
    )
    host = in_unit((statistics.median(host_s(steps)) for steps in rounds), "us")
    yield Figure(f"{name}_host", f"  host's part of it, {label}", "us", host)
