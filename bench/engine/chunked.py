"""A long prompt prefilled in chunks beside running sequences: what each costs the other."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from tandem.bench.engine.prefill import STEP_TOKENS
from tandem.bench.engine.rig import (
    Rig,
    StepRecord,
    Workshop,
    in_parts,
    intervals_s,
)
from tandem.bench.engine.setting import num_rounds
from tandem.bench.kernels.figures import Goal, Measurement
from tandem.bench.kernels.timing import Setting
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Runner
from tandem.engine.schedule.step_cost import longest_step_s

NUM_WARM_STEPS = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the sequences that run and the prompt that comes."""

    num_seqs: int
    context: int
    prompt: int


@dataclass(frozen=True, slots=True)
class Round:
    """The same prompt alone, and beside decodes."""

    alone: list[StepRecord]
    decoding: list[StepRecord]  # before the prompt came
    beside: list[StepRecord]


def run(setting: Setting) -> Iterator[Measurement]:
    """The first round is how an engine begins that has timed no such step yet; it counts too."""
    sizes = Sizes(setting.size(32, 4), setting.size(1024, 32), setting.size(32768, 256))
    workshop = Workshop(setting)
    config = workshop.config(
        max_num_seqs=setting.size(64, 8),
        max_num_batched_tokens=STEP_TOKENS,
        prefill_chunk_tokens=STEP_TOKENS,
    )
    runner = workshop.runner(config)
    limit_ms = 1e3 * longest_step_s(config, runner.kv_cache.memory)
    yield from in_parts([("chunked", partial(_rounds, config, runner, sizes, limit_ms, setting))])


def _rounds(
    config: EngineConfig, runner: Runner, sizes: Sizes, limit_ms: float, setting: Setting
) -> Iterator[Measurement]:
    _round(Rig(config, runner), sizes)  # another engine: kernels are compiled, nothing is learnt
    rig = Rig(config, runner)
    rounds = [_round(rig, sizes) for _ in range(num_rounds(setting))]
    yield from _steps(rounds, sizes, limit_ms)
    yield from _prompts(rounds, sizes)


def _steps(rounds: list[Round], sizes: Sizes, limit_ms: float) -> Iterator[Measurement]:
    """What the prompt costs the running sequences."""
    worst = [max(_device_ms(each.beside)) for each in rounds]
    what = f"{sizes.prompt} tokens are prefilled beside {sizes.num_seqs} sequences"
    yield Measurement(
        name="chunked_worst_step",
        label=f"worst decode step while {what}",
        unit="ms",
        values=(max(worst),),
        goal=Goal(limit_ms),
        note="by round "
        + ", ".join(f"{ms:.4g}" for ms in worst)
        + f"; {len(rounds[-1].beside)} steps in the last",
    )
    yield Measurement(
        name="chunked_median_step",
        label="median decode step meanwhile",
        unit="ms",
        values=tuple(statistics.median(_device_ms(each.beside)) for each in rounds),
    )
    yield Measurement(
        name="chunked_worst_gap",
        label="worst gap between a sequence's tokens meanwhile",
        unit="ms",
        seconds=tuple(max(intervals_s([each.decoding[-1], *each.beside])) for each in rounds),
    )
    yield Measurement(
        name="chunked_step_before",
        label=f"decode step without a prompt, B {sizes.num_seqs}",
        unit="ms",
        values=tuple(statistics.median(_device_ms(each.decoding)) for each in rounds),
    )


def _prompts(rounds: list[Round], sizes: Sizes) -> Iterator[Measurement]:
    """What the running sequences cost the prompt."""
    alone = [_wall_s(each.alone) for each in rounds]
    yield Measurement(
        name="chunked_prompt_alone",
        label=f"prefill of {sizes.prompt} tokens alone",
        unit="ms",
        seconds=tuple(alone),
    )
    yield Measurement(
        name="chunked_prompt_beside",
        label="the same in chunks beside them",
        unit="ms",
        seconds=tuple(_wall_s(each.beside) for each in rounds),
        limit=1e3 * statistics.median(alone),
    )


def _round(rig: Rig, sizes: Sizes) -> Round:
    alone = rig.prefill(rig.prompt(sizes.prompt))
    prompt = rig.prompt(sizes.prompt)
    rig.place(sizes.num_seqs, sizes.context)
    try:
        return Round(alone, rig.decode(NUM_WARM_STEPS), rig.prefill(prompt))
    finally:
        rig.clear()


def _device_ms(records: list[StepRecord]) -> list[float]:
    return [record.device_s * 1e3 for record in records if record.num_decodes]


def _wall_s(records: list[StepRecord]) -> float:
    """From the launch of the first step that holds some of the prompt to the prompt's token."""
    first = next(record for record in records if record.num_prompt_tokens)
    return records[-1].ended_at - first.launched_at
