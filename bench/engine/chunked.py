"""A long prompt prefilled in chunks beside running sequences, and the cost for each of them."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from tandem.bench.engine.prefill import STEP_TOKENS
from tandem.bench.engine.rig import Rig, StepRecord, Workshop, in_parts, intervals_s
from tandem.bench.engine.setting import num_rounds
from tandem.bench.report.figures import Figure, at_most, in_unit
from tandem.bench.report.setting import Setting
from tandem.engine.config import EngineConfig
from tandem.engine.runner import Runner
from tandem.engine.schedule.step_cost import longest_step_s

NUM_WARM_STEPS = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the running sequences and of the prompt."""

    num_seqs: int
    context: int
    prompt: int


@dataclass(frozen=True, slots=True)
class Round:
    """The steps of one round: the same prompt alone, and beside decodes."""

    alone: list[StepRecord]
    decoding: list[StepRecord]  # before the prompt came
    beside: list[StepRecord]


def run(setting: Setting) -> Iterator[Figure]:
    """Measure rounds; the first one, of an engine that has timed no such step yet, counts too."""
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
) -> Iterator[Figure]:
    _round(Rig(config, runner), sizes)  # another engine: kernels are compiled, nothing is learned
    rig = Rig(config, runner)
    rounds = [_round(rig, sizes) for _ in range(num_rounds(setting))]
    yield from _steps(rounds, sizes, limit_ms)
    yield from _prompts(rounds, sizes)


def _steps(rounds: list[Round], sizes: Sizes, limit_ms: float) -> Iterator[Figure]:
    """Yield the cost of the prompt for the running sequences."""
    worst = [max(_device_ms(each.beside)) for each in rounds]
    what = f"{sizes.prompt} tokens are prefilled beside {sizes.num_seqs} sequences"
    yield Figure(
        "chunked_worst_step",
        f"worst decode step while {what}",
        "ms",
        (max(worst),),
        at_most(limit_ms),
        notes=(f"by round {', '.join(f'{ms:.4g}' for ms in worst)}",),
    )
    yield Figure(
        "chunked_median_step",
        "median decode step meanwhile",
        "ms",
        tuple(statistics.median(_device_ms(each.beside)) for each in rounds),
    )
    yield Figure(
        "chunked_worst_gap",
        "worst gap between a sequence's tokens meanwhile",
        "ms",
        in_unit((max(intervals_s([each.decoding[-1], *each.beside])) for each in rounds), "ms"),
    )
    yield Figure(
        "chunked_step_before",
        f"decode step without a prompt, B {sizes.num_seqs}",
        "ms",
        tuple(statistics.median(_device_ms(each.decoding)) for each in rounds),
    )


def _prompts(rounds: list[Round], sizes: Sizes) -> Iterator[Figure]:
    """Yield the cost of the running sequences for the prompt."""
    alone = [_wall_s(each.alone) for each in rounds]
    yield Figure(
        "chunked_prompt_alone",
        f"prefill of {sizes.prompt} tokens alone",
        "ms",
        in_unit(alone, "ms"),
    )
    yield Figure(
        "chunked_prompt_beside",
        "the same in chunks beside them",
        "ms",
        in_unit((_wall_s(each.beside) for each in rounds), "ms"),
        ceiling=1e3 * statistics.median(alone),
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
    """Return the time from the launch of the prompt's first step to the prompt's token."""
    first = next(record for record in records if record.num_prompt_tokens)
    return records[-1].ended_at - first.launched_at
