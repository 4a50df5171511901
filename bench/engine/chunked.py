"""A long prompt prefilled in chunks beside running sequences, and the cost for each of them."""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tandem.bench.engine.prefill import STEP_TOKENS
from tandem.bench.engine.rig import Rig, StepRecord, Workshop, intervals_s
from tandem.bench.engine.setting import num_rounds
from tandem.bench.report.figures import Figure, at_most, in_unit, medians
from tandem.bench.report.setting import Setting
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
    limit_ms = 1e3 * longest_step_s(config, runner.device_kind)
    _round(Rig(config, runner), sizes)  # another engine: kernels are compiled, nothing is learned
    rig = Rig(config, runner)
    rounds = [_round(rig, sizes) for _ in range(num_rounds(setting))]
    beside_ms = [_device_ms(each.beside) for each in rounds]
    worst_ms = [max(times) for times in beside_ms]
    what = f"{sizes.prompt} tokens are prefilled beside {sizes.num_seqs} sequences"
    by_round = f"by round {', '.join(f'{ms:.4g}' for ms in worst_ms)}"
    label, limit = f"worst decode step while {what}", at_most(limit_ms)
    yield _ms("worst_step", label, [max(worst_ms)], target=limit, notes=(by_round,))
    yield _ms("median_step", "median decode step meanwhile", medians(beside_ms))
    gaps_s = (max(intervals_s([each.decoding[-1], *each.beside])) for each in rounds)
    yield _ms("worst_gap", "worst gap between a sequence's tokens meanwhile", in_unit(gaps_s, "ms"))
    before_ms = medians(_device_ms(each.decoding) for each in rounds)
    yield _ms("step_before", f"decode step without a prompt, B {sizes.num_seqs}", before_ms)
    alone_ms = in_unit((_wall_s(each.alone) for each in rounds), "ms")
    yield _ms("prompt_alone", f"prefill of {sizes.prompt} tokens alone", alone_ms)
    together_ms = in_unit((_wall_s(each.beside) for each in rounds), "ms")
    ceiling = statistics.median(alone_ms)
    yield _ms("prompt_beside", "the same in chunks beside them", together_ms, ceiling=ceiling)


def _ms(name: str, label: str, samples: Iterable[float], **more: Any) -> Figure:
    return Figure(f"chunked_{name}", label, "ms", tuple(samples), **more)


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
