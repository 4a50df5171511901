"""Whole prompts through engine and runner, held against the matrix products that they need."""

from collections.abc import Iterator
from functools import partial

import msgspec

from tandem.bench.engine.floors import prefill_flops
from tandem.bench.engine.profile import profiled
from tandem.bench.engine.rig import Rig, StepRecord, Workshop, in_parts
from tandem.bench.engine.setting import goal_for, num_rounds
from tandem.bench.kernels.figures import Goal, Measurement
from tandem.bench.kernels.timing import Setting

LENGTHS = (2048, 8192, 32768)
TINY_LENGTHS = (32, 64)
NUM_PROFILED_PROMPTS, NUM_PROFILED_DRY = 3, 1
STEP_TOKENS = 8192
# On an H200 in ms, elsewhere as the share of the floor that they are there.
GOALS = {8192: (Goal(215.0, 198.0), Goal(0.786, 0.854, "share"))}


def run(setting: Setting) -> Iterator[Measurement]:
    """Lengths take turns within each round."""
    rig = Workshop(setting).rig(max_num_seqs=8, max_num_batched_tokens=STEP_TOKENS)
    lengths = TINY_LENGTHS if setting.is_dry else LENGTHS
    rounds: dict[int, list[list[StepRecord]]] = {length: [] for length in lengths}
    yield from (_measurement(rig, length, rounds[length], setting) for length in lengths)
    yield from in_parts(
        [
            ("prefill", partial(_prompts, rig, rounds, setting)),
            (
                "profile of prefill",
                partial(_profile, rig, lengths[1], rounds[lengths[1]], setting),
            ),
        ]
    )


def _prompts(
    rig: Rig, rounds: dict[int, list[list[StepRecord]]], setting: Setting
) -> Iterator[Measurement]:
    for index in range(setting.num_warmups + num_rounds(setting)):
        for length, found in rounds.items():
            records = rig.prefill(rig.prompt(length))
            if index >= setting.num_warmups:
                found.append(records)
    for length, found in rounds.items():
        yield _measurement(rig, length, found, setting)
        yield Measurement(
            name=f"prefill_{length}_to_token",
            label=f"prefill of {length} tokens, until its token is on the host",
            unit="ms",
            seconds=tuple(each[-1].ended_at - each[0].launched_at for each in found),
        )


def _profile(
    rig: Rig, length: int, rounds: list[list[StepRecord]], setting: Setting
) -> Iterator[Measurement]:
    num_prompts = setting.size(NUM_PROFILED_PROMPTS, NUM_PROFILED_DRY)

    def prompts() -> int:
        return sum(len(rig.prefill(rig.prompt(length))) for _ in range(num_prompts))

    found = profiled(prompts, setting).profile
    if rounds:
        yield msgspec.structs.replace(_measurement(rig, length, rounds, setting), profile=found)


def _measurement(
    rig: Rig, length: int, rounds: list[list[StepRecord]], setting: Setting
) -> Measurement:
    goals = GOALS.get(length)
    return Measurement(
        name=f"prefill_{length}",
        label=f"prefill of {length} tokens",
        unit="ms",
        work=prefill_flops(rig.model, length),
        rate="matmul",
        seconds=tuple(sum(record.device_s for record in records) for records in rounds),
        goal=goal_for(setting, *goals) if goals else None,
        timed_by=f"the runner's own events around each step of up to {STEP_TOKENS} tokens, summed",
    )
