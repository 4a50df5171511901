"""The warp-specialised build of prefill attention, in a process of its own: it may hang."""

from collections.abc import Iterator, Sequence

import torch

from tandem.bench.kernels.cases import Case, measure_groups
from tandem.bench.kernels.figures import Measurement
from tandem.bench.kernels.prefill import DENSE_GOAL, LENGTHS, PAGED_GOAL, prefill_case
from tandem.bench.kernels.timing import Setting
from tandem.kernels.attention.prefill_hopper import prefill_attention_hopper

ARCHITECTURE = (9, 0)
BLOCK_SIZES = (64, 128)


def run(setting: Setting) -> Iterator[Measurement]:
    """Nothing but on the chip that it is written for."""
    if setting.is_dry or torch.cuda.get_device_capability(setting.device) != ARCHITECTURE:
        return
    yield from measure_groups(
        [prefill_dense_warp_specialised, prefill_paged_warp_specialised], setting
    )


def prefill_dense_warp_specialised(setting: Setting) -> Sequence[Case]:
    return [
        _case(name, block_size, False, setting) for name in LENGTHS for block_size in BLOCK_SIZES
    ]


def prefill_paged_warp_specialised(setting: Setting) -> Sequence[Case]:
    return [
        _case(name, block_size, True, setting) for name in LENGTHS for block_size in BLOCK_SIZES
    ]


def _case(name: str, block_size: int, shuffled: bool, setting: Setting) -> Case:
    kind = "paged" if shuffled else "dense"
    return prefill_case(
        f"prefill_hopper_{kind}_{name}_block{block_size}",
        f"prefill {kind} {name}, block {block_size} (warp-specialised)",
        [(LENGTHS[name], LENGTHS[name])],
        block_size,
        setting,
        shuffled=shuffled,
        goal=PAGED_GOAL if shuffled else DENSE_GOAL,
        attention=prefill_attention_hopper,
    )
