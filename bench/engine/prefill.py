"""Whole prompts through engine and runner, held against the matrix products that they need."""

import statistics
from collections.abc import Iterator

from tandem.bench.engine.floors import prefill_flops
from tandem.bench.engine.profile import noted, profiled
from tandem.bench.engine.rig import Rig, StepRecord, Workshop
from tandem.bench.engine.setting import num_rounds, target_for
from tandem.bench.report.figures import Bound, Figure, at_least, at_most, in_unit
from tandem.bench.report.setting import Setting
from tandem.engine.config import DECODE_STEP_TOKENS, EngineConfig

LENGTHS = (64, 2048, 8192, 32768)  # the first waits for the launches of its kernels
TINY_LENGTHS = (32, 64, 96)
NUM_PROFILED_PROMPTS, NUM_PROFILED_DRY = 3, 1
STEP_TOKENS = 8192
TINY_SHORT_STEP_TOKENS = 16
# On an H200 in ms, elsewhere as the share of the floor that they are there.
TARGETS = {8192: (at_most(215.0, 198.0), at_least(0.786, 0.854, "share"))}


def run(setting: Setting) -> Iterator[Figure]:
    """Measure every length; lengths take turns within each round."""
    workshop = Workshop(setting)
    config = workshop.config(max_num_seqs=8, max_num_batched_tokens=STEP_TOKENS)
    runner = workshop.runner(config)
    rig, short = Rig(config, runner), Rig(_with_short_steps(config, setting), runner)
    lengths = TINY_LENGTHS if setting.is_dry else LENGTHS
    rounds: dict[int, list[list[StepRecord]]] = {length: [] for length in lengths}
    yield from (_prompt_figure(rig, length, rounds[length], setting) for length in lengths)
    yield from _prompts(rig, rounds, setting)
    yield from _short_steps(short, rig, lengths[-2], setting)
    yield from _profile(rig, lengths[-2], rounds[lengths[-2]], setting)


def _prompts(
    rig: Rig, rounds: dict[int, list[list[StepRecord]]], setting: Setting
) -> Iterator[Figure]:
    for index in range(setting.num_warmups + num_rounds(setting)):
        for length, found in rounds.items():
            records = rig.prefill(rig.prompt(length))
            if index >= setting.num_warmups:
                found.append(records)
    for length, found in rounds.items():
        yield _prompt_figure(rig, length, found, setting)
        yield Figure(
            f"prefill_{length}_to_token",
            f"prefill of {length} tokens, until its token is on the host",
            "ms",
            in_unit((each[-1].ended_at - each[0].launched_at for each in found), "ms"),
        )


def _with_short_steps(config: EngineConfig, setting: Setting) -> EngineConfig:
    num_tokens = setting.size(DECODE_STEP_TOKENS, TINY_SHORT_STEP_TOKENS)
    return config.model_copy(update={"max_num_batched_tokens": num_tokens})


def _short_steps(short: Rig, rig: Rig, length: int, setting: Setting) -> Iterator[Figure]:
    """Yield the time of a prompt in the steps of a decode worker; it takes turns with `rig`."""
    rounds: list[tuple[float, float]] = []
    for index in range(setting.num_warmups + num_rounds(setting)):
        short_s, whole_s = (
            sum(step.device_s for step in each.prefill(each.prompt(length)))
            for each in (short, rig)
        )
        if index >= setting.num_warmups:
            rounds.append((short_s, whole_s))
    whole_ms = 1e3 * statistics.median(whole_s for _, whole_s in rounds)
    yield Figure(
        f"prefill_{length}_short_steps",
        f"prefill of {length} tokens in steps of {short.engine.scheduler.max_num_batched_tokens}",
        "ms",
        in_unit((short_s for short_s, _ in rounds), "ms"),
        notes=(f"in steps of {STEP_TOKENS} {whole_ms:.4g} ms",),
    )


def _profile(
    rig: Rig, length: int, rounds: list[list[StepRecord]], setting: Setting
) -> Iterator[Figure]:
    num_prompts = setting.size(NUM_PROFILED_PROMPTS, NUM_PROFILED_DRY)

    def prompts() -> int:
        return sum(len(rig.prefill(rig.prompt(length))) for _ in range(num_prompts))

    profile, _ = profiled(prompts, setting)
    if rounds:
        yield noted(_prompt_figure(rig, length, rounds, setting), profile)


def _prompt_figure(
    rig: Rig, length: int, rounds: list[list[StepRecord]], setting: Setting
) -> Figure:
    targets = TARGETS.get(length)
    return Figure(
        f"prefill_{length}",
        f"prefill of {length} tokens",
        "ms",
        in_unit((sum(each.device_s for each in steps) for steps in rounds), "ms"),
        target_for(setting, *targets) if targets else None,
        bound=Bound("matmul", prefill_flops(rig.model, length)),
    )
