"""Decode steps with CUDA graphs on and off, and with overlap on and off, in turns."""

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

from tandem.bench.engine.decode import Point, measure
from tandem.bench.engine.rig import Rig, StepRecord, Workshop, host_s, intervals_s
from tandem.bench.engine.setting import num_rounds
from tandem.bench.report.figures import Figure, in_unit
from tandem.bench.report.setting import Setting

SLOTS_PER_POOL = 128 * 1024  # so that both pools fit beside one set of weights


@dataclass(slots=True)
class Variant:
    """One setting of both switches, and its rounds of steps."""

    has_graphs: bool
    has_overlap: bool
    rig: Rig
    rounds: dict[str, list[list[StepRecord]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"graphs_{_on(self.has_graphs)}_overlap_{_on(self.has_overlap)}"

    @property
    def label(self) -> str:
        return f"graphs {_on(self.has_graphs)}, overlap {_on(self.has_overlap)}"


def run(setting: Setting) -> Iterator[Figure]:
    """Measure every variant in every round, over the same weights; two engines share a runner."""
    variants = _variants(Workshop(setting), setting)
    context = setting.size(1024, 32)
    points = [Point(num_seqs, context) for num_seqs in (setting.size(8, 1), setting.size(64, 4))]
    num_steps = setting.size(96, 4)
    for index in range(setting.num_warmups + num_rounds(setting)):
        for point, variant in itertools.product(points, variants):
            records = measure(variant.rig, point, num_steps)
            if index >= setting.num_warmups:
                variant.rounds.setdefault(point.name, []).append(records)
    for point, variant in itertools.product(points, variants):
        yield from _figures(point, variant)


def _variants(workshop: Workshop, setting: Setting) -> list[Variant]:
    variants = []
    for has_graphs in (True, False):
        shared = {
            "max_num_seqs": setting.size(64, 4),
            "cuda_graphs": has_graphs,
            "num_blocks": None if setting.is_dry else SLOTS_PER_POOL // 64,
        }
        runner = workshop.runner(workshop.config(**shared))
        for has_overlap in (True, False):
            config = workshop.config(**shared, overlap=has_overlap)
            variants.append(Variant(has_graphs, has_overlap, Rig(config, runner)))
    return variants


def _figures(point: Point, variant: Variant) -> Iterator[Figure]:
    rounds = variant.rounds[point.name]
    name, label = f"{variant.name}_b{point.num_seqs}", f"B {point.num_seqs}, {variant.label}"
    device_ms = statistics.median(1e3 * record.device_s for records in rounds for record in records)
    yield Figure(
        f"{name}_step",
        f"from tokens to tokens, {label}",
        "ms",
        in_unit((statistics.median(intervals_s(steps)) for steps in rounds), "ms"),
        ceiling=device_ms,
    )
    yield Figure(
        f"{name}_host",
        f"host's part of it, {label}",
        "us",
        tuple(1e6 * statistics.median(host_s(records)) for records in rounds),
    )


def _on(value: bool) -> str:
    return "on" if value else "off"
