"""Decode steps by cuBLAS and by fused products, and with kernels that begin early, in turns."""

from collections.abc import Iterator

from tandem.bench.engine.decode import Point, measure
from tandem.bench.engine.floors import decode_bytes
from tandem.bench.engine.rig import Rig, Workshop
from tandem.bench.engine.setting import num_rounds
from tandem.bench.report.figures import Bound, Figure, in_unit, medians
from tandem.bench.report.setting import Setting

SLOTS_PER_POOL = 64 * 1024  # so that all pools fit beside one set of weights
VARIANTS = {
    "cublas": {},
    "cublas_early": {"dependent_launch": True},
    "fused": {"fused_products": True},
    "fused_early": {"fused_products": True, "dependent_launch": True},
}


def run(setting: Setting) -> Iterator[Figure]:
    """Measure every variant in every round, over the same weights."""
    workshop = Workshop(setting)
    rigs = {name: _rig(workshop, setting, options) for name, options in VARIANTS.items()}
    context, num_steps = setting.size(1024, 32), setting.size(48, 4)
    points = {
        name: [Point(num_seqs, context) for num_seqs in (1, setting.size(16, 2))] for name in rigs
    }
    for index in range(setting.num_warmups + num_rounds(setting)):
        for name, rig in rigs.items():
            for point in points[name]:
                records = measure(rig, point, num_steps)
                if index >= setting.num_warmups:
                    point.rounds.append(records)
    for name, rig in rigs.items():
        for point in points[name]:
            times = medians([each.device_s for each in steps] for steps in point.rounds)
            yield Figure(
                f"{point.name}_{name}",
                f"{point.label}, {name.replace('_', ', ')}",
                "ms",
                in_unit(times, "ms"),
                bound=Bound("read", decode_bytes(rig.model, point.num_seqs * context)),
            )


def _rig(workshop: Workshop, setting: Setting, options: dict[str, bool]) -> Rig:
    num_blocks = None if setting.is_dry else SLOTS_PER_POOL // 64
    return workshop.rig(max_num_seqs=setting.size(16, 2), num_blocks=num_blocks, **options)
