"""The profile of this machine's engine, for emulated workers: fitted to steps of many shapes.

python -m tandem.bench.engine.fitted MODEL --output mine.yaml
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from tandem.bench.engine.rig import Rig, StepRecord
from tandem.bench.report.console import say
from tandem.bench.report.options import option, parse
from tandem.emulation.profile import Profile
from tandem.engine.config import TILE_TOKENS, DeviceKind, EngineConfig
from tandem.engine.execution.model_runner import ModelRunner
from tandem.engine.memory.kv_blocks import bytes_per_token
from tandem.engine.schedule.sequence import Chunk
from tandem.engine.schedule.step_cost import StepCost, StepWork, work_of
from tandem.runtime.errors import ConfigError, TandemError

MODULE = "tandem.bench.engine.fitted"
DECODES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (16, 512, 2048)
PROMPTS = (16, 32, 64, 128, 256, 512, 1024, 2048)
NUM_STEPS = 6  # of decodes alone
LONGEST_STEP_MS = 1e6  # chunks beside decodes are bound by their tokens alone
OUTLIER = 4.0  # times the median error: such steps were disturbed
NUM_FITS = 3  # each without the outliers of the one before
LEAST_ERROR = 1e-6
CLEARLY = 0.9  # of the other step model's error
WARM_UP_TOKENS = 128  # of prompts and contexts before those that count
TINY_S = 1e-9  # a profile's costs are above 0
EXIT_FAILED = 1
Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Options:
    """Measure the engine's steps on this machine and write a profile for `--emulate`."""

    model: tuple[str, ...] = option((), "folder of the model", is_positional=True)
    output: Path | None = option(None, "the profile's file (default: print it)")
    device: str = option("auto", "of the engine: auto, cpu or cuda:N")
    threads: int | None = option(None, "of the engine on a CPU; with 1, its CPU time counts")
    seconds: float = option(40.0, "to measure for", least=1)
    longest: int = option(2048, "tokens of a prompt or context", least=16)
    link_gb_per_s: float = option(40.0, "of the network between workers, in 10^9 bytes/s")
    link_latency_ms: float = option(0.05, "of the same")

    def __post_init__(self) -> None:
        if len(self.model) > 1:
            raise ConfigError("name the folder of one model")


@dataclass(frozen=True, slots=True)
class Observed:
    """One step."""

    work: StepWork
    num_rows: int  # tokens drawn
    seconds: float


class Observer(StepCost):
    """The costs that an engine learns, and the steps that it learned them from.

    With the records of a runner on one thread of a CPU, a step takes the CPU time of its launch.
    """

    def __init__(
        self, max_step_s: float, kind: DeviceKind, records: Sequence[StepRecord] | None
    ) -> None:
        super().__init__(max_step_s, TILE_TOKENS[kind], has_floor=kind == "gpu")
        self.steps: list[Observed] = []
        self._records = records

    def observe(self, chunks: list[Chunk], seconds: float) -> None:
        """Keep a step, and learn from it."""
        if self._records is not None:
            seconds = self._records[-1].launch_cpu_s
        num_rows = sum(chunk.samples for chunk in chunks)
        self.steps.append(Observed(work_of(chunks), num_rows, seconds))
        super().observe(chunks, seconds)


# ---- measuring ----------------------------------------------------------------------------------


def measure(rig: Rig, seconds: float, longest: int) -> None:
    """Run steps of all shapes in turn, for about `seconds`; the first turn is whole in any case."""
    deadline_s = time.perf_counter() + seconds
    is_first = True
    while is_first or time.perf_counter() < deadline_s:
        for num_prompt in PROMPTS:
            if num_prompt <= longest:
                rig.prefill(rig.prompt(num_prompt))
        for num_decodes in DECODES:
            for context in CONTEXTS:
                if _fits(rig, num_decodes, context, longest):
                    _run_decodes(rig, num_decodes, context, longest)
        is_first = False


def _fits(rig: Rig, num_decodes: int, context: int, longest: int) -> bool:
    is_within = num_decodes * context <= rig.num_slots // 2 and context <= longest
    return is_within and num_decodes < rig.engine.scheduler.max_num_seqs


def _run_decodes(rig: Rig, num_decodes: int, context: int, longest: int) -> None:
    """Run steps of decodes alone, and then beside a prompt."""
    rig.place(num_decodes, context)
    for _ in range(NUM_STEPS):
        rig.step()
    num_prompt = PROMPTS[(num_decodes.bit_length() + context.bit_length()) % len(PROMPTS)]
    rig.prefill(rig.prompt(min(num_prompt, longest, rig.num_slots // 4)))
    rig.clear()


# ---- fitting ------------------------------------------------------------------------------------


def fit(steps: Sequence[Observed], profile: Profile) -> Profile:
    """Return `profile` with the costs that are nearest to the steps, by the better step model.

    The sum of weights and products, which is the simpler one, unless their maximum is clearly
    nearer.
    """
    kept = list(steps)
    for _ in range(NUM_FITS):
        found: dict[bool, tuple[float, Profile]] = {}  # by the step model, with its error
        for costs in _fits_of(kept, profile):
            each = profile.model_copy(update=costs)
            error = max(float(np.median(errors_of(each, kept))), LEAST_ERROR)
            if error < found.get(each.is_additive, (np.inf, each))[0]:
                found[each.is_additive] = error, each
        maximum = found.get(False, (np.inf, profile))
        _, best = maximum if maximum[0] < CLEARLY * found[True][0] else found[True]
        errors = errors_of(best, steps)
        limit = OUTLIER * max(float(np.median(errors)), LEAST_ERROR)
        kept = [each for each, error in zip(steps, errors, strict=True) if error <= limit]
    return best


def errors_of(profile: Profile, steps: Sequence[Observed]) -> Numbers:
    """Return how far off the profile's times are, as shares of the measured ones."""
    fitted = np.array(
        [profile.step_seconds(each.work, each.num_rows, each.work.num_decodes) for each in steps]
    )
    measured = np.array([each.seconds for each in steps])
    errors: Numbers = np.abs(fitted / measured - 1)
    return errors


def _fits_of(steps: Sequence[Observed], profile: Profile) -> Iterator[dict[str, float]]:
    """Yield fits of the sum of weights and products, and of their maximum.

    Of the maximum there is one for each number of tokens from which products count.
    """
    tokens = np.array(
        [profile.num_multiplied(each.work, each.work.num_decodes) for each in steps], dtype=float
    )
    rest = [[each.work.prompt_context, each.work.decode_context, each.num_rows] for each in steps]
    ones, measured = np.ones(len(steps)), np.array([each.seconds for each in steps])
    step_s, *others = _solved(np.column_stack([ones, tokens, rest]), measured)
    yield _named([step_s, 0.0, *others]) | {"is_additive": True}
    for least in sorted(set(tokens))[1:]:
        by_products = tokens >= least
        columns = [ones, ~by_products, np.where(by_products, tokens, 0.0), rest]
        yield _named(_solved(np.column_stack(columns), measured)) | {"is_additive": False}


def _solved(columns: Numbers, measured: Numbers) -> list[float]:
    """Return the factors, none of them negative, with the least squares of relative errors."""
    factors, kept = np.zeros(columns.shape[1]), list(range(columns.shape[1]))
    relative = columns / measured[:, None]
    scales = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    while kept:
        found, *_ = np.linalg.lstsq(relative[:, kept] / scales[kept], np.ones(len(measured)))
        if found.min() >= 0:
            factors[kept] = found / scales[kept]
            break
        del kept[int(found.argmin())]
    return factors.tolist()


def _named(factors: Sequence[float]) -> dict[str, float]:
    step_s, weights_s, token_s, position_s, context_s, row_s = factors
    return {
        "step_s": max(step_s, TINY_S),
        "weights_s": max(weights_s, TINY_S),
        "token_s": max(token_s, TINY_S),
        "position_s": position_s,
        "context_s": context_s,
        "row_s": row_s,
    }


def profile_of(options: Options) -> tuple[Profile, list[Observed]]:
    """Measure and return the profile and its steps. Raises a TandemError without an engine."""
    (model,) = options.model
    config = EngineConfig(
        model=model,
        device=options.device,
        threads=options.threads,
        max_step_ms=LONGEST_STEP_MS,
        enable_prefix_cache=False,
    )
    runner = ModelRunner(config)
    kind, cache = runner.device_kind, runner.kv_cache
    rig = Rig(config, runner)
    records = rig.runner.records if kind == "cpu" and options.threads == 1 else None
    observer = rig.engine.scheduler.step_cost = Observer(LONGEST_STEP_MS / 1e3, kind, records)
    longest = min(options.longest, rig.engine.max_model_len // 2)
    measure(rig, 0.0, min(longest, WARM_UP_TOKENS))
    observer.steps.clear()
    measure(rig, options.seconds, longest)
    unknown = Profile(
        device_kind=kind,
        **_named([0.0] * 6),
        tile_tokens=TILE_TOKENS[kind],
        kv_bytes_per_token=bytes_per_token(runner.model_config, longest),
        kv_tokens=cache.num_blocks * cache.block_size,
        link_bytes_per_s=1e9 * options.link_gb_per_s,
        link_latency_s=1e-3 * options.link_latency_ms,
        max_position_embeddings=runner.model_config.max_position_embeddings,
    )
    return fit(observer.steps, unknown), observer.steps


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write or print the profile, and return the exit status."""
    options = parse(Options, MODULE, arguments)
    try:
        profile, steps = profile_of(options)
        values = profile.model_dump(exclude_defaults=True).items()
        rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values}
        text = f"# {options.model[0]}, by {MODULE}\n" + yaml.safe_dump(rounded, sort_keys=False)
        if options.output is None:
            print(text, end="")
        else:
            options.output.write_text(text, encoding="utf-8")
    except (TandemError, OSError) as error:
        say(f"error: {error}")
        return EXIT_FAILED
    errors = errors_of(profile, steps)
    half, most = np.quantile(errors, (0.5, 0.9))
    say(
        f"{len(steps)} steps: half of them within {half:.1%} of the profile, 90 % within {most:.1%}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
