"""Decode steps by each variant of the engine's options, in turns and over the same weights."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product

from tandem.bench.engine.decode import Point, measure
from tandem.bench.engine.floors import decode_bytes
from tandem.bench.engine.rig import Rig, StepRecord, Workshop, host_s, intervals_s
from tandem.bench.engine.setting import num_rounds
from tandem.bench.report.figures import Bound, Figure, in_unit
from tandem.bench.report.setting import Setting
from tandem.engine.model_runner import ModelRunner

Options = Mapping[str, bool]
SWITCHES: Mapping[str, Options] = {
    f"graphs_{graphs}_overlap_{overlap}": {
        "cuda_graphs": graphs == "on",
        "overlap": overlap == "on",
    }
    for graphs, overlap in product(("on", "off"), repeat=2)
}
PRODUCTS: Mapping[str, Options] = {
    "cublas": {},
    "cublas_early": {"dependent_launch": True},
    "fused": {"fused_products": True},
    "fused_early": {"fused_products": True, "dependent_launch": True},
}
SLOTS_PER_POOL = 64 * 1024  # so that all pools fit beside one set of weights
NUM_SEQS = (1, 16)


@dataclass(slots=True)
class Variant:
    """Options of an engine, and its rounds of steps by the number of sequences."""

    name: str
    rig: Rig
    rounds: dict[int, list[list[StepRecord]]] = field(default_factory=dict)


def _run(kind: Mapping[str, Options], setting: Setting) -> Iterator[Figure]:
    """Measure every variant in every round."""
    variants = list(_variants(kind, setting))
    context, num_steps = setting.size(1024, 32), setting.size(48, 4)
    points = [Point(setting.size(num_seqs, min(num_seqs, 2)), context) for num_seqs in NUM_SEQS]
    for index in range(setting.num_warmups + num_rounds(setting)):
        for point, variant in product(points, variants):
            records = measure(variant.rig, point, num_steps)
            if index >= setting.num_warmups:
                variant.rounds.setdefault(point.num_seqs, []).append(records)
    for point, variant in product(points, variants):
        yield from _figures(point, variant)


def _variants(kind: Mapping[str, Options], setting: Setting) -> Iterator[Variant]:
    """Yield the variants; those that differ in overlap alone share a runner and its pool."""
    workshop, runners = Workshop(setting), dict[str, ModelRunner]()
    num_blocks = None if setting.is_dry else SLOTS_PER_POOL // 64
    shared = {"max_num_seqs": setting.size(max(NUM_SEQS), 2), "num_blocks": num_blocks}
    for name, options in kind.items():
        config = workshop.config(**shared, **options)
        key = name.partition("_overlap")[0]
        if key not in runners:
            runners[key] = workshop.runner(config)
        yield Variant(name, Rig(config, runners[key]))


def _figures(point: Point, variant: Variant) -> Iterator[Figure]:
    rounds = variant.rounds[point.num_seqs]
    name, label = f"{point.name}_{variant.name}", f"B {point.num_seqs}, {variant.name}"
    device_s = [statistics.median(each.device_s for each in steps) for steps in rounds]
    floor = Bound("read", decode_bytes(variant.rig.model, point.num_seqs * point.context))
    yield Figure(name, f"decode step, {label}", "ms", in_unit(device_s, "ms"), bound=floor)
    yield Figure(
        f"{name}_step",
        f"  from tokens to tokens, {label}",
        "ms",
        in_unit((statistics.median(intervals_s(steps)) for steps in rounds), "ms"),
        ceiling=1e3 * statistics.median(device_s),
    )
    host = in_unit((statistics.median(host_s(steps)) for steps in rounds), "us")
    yield Figure(f"{name}_host", f"  host's part of it, {label}", "us", host)


switches = partial(_run, SWITCHES)
products = partial(_run, PRODUCTS)
