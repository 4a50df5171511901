"""Cases to measure: each checked before and after, timed in turns, its compiled kernels read."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
from triton.runtime.jit import JITFunction

from tandem.bench.kernels.compile import REGISTERS_PER_SM, RESERVED_SHARED_BYTES
from tandem.bench.kernels.figures import Build, Goal, Measurement, Rate, Unit
from tandem.bench.kernels.timing import Call, Sample, Setting, make_sample, synchronize

# Of the norm. Outputs are rounded once or twice, and so are the weights of an attention: some
# units of the type. A tile or a row that is missing is far above all of these.
ERROR_BOUNDS = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 1e-2}
_INSTRUCTIONS = {
    "wgmma": "wgmma.mma_async",
    "mma": "mma.sync",
    "tma": "cp.async.bulk.tensor",
    "cp.async": "cp.async.cg.shared",
    "16-byte loads": "ld.global.v4",
}


Check = Callable[[Call], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to measure: the same work on `num_sets` sets of inputs.

    `launch(index, config)` runs it on one set in one configuration of its kernel. `check(run)`
    poisons the outputs of the first set, calls run() to launch on it, and gives the relative error.
    """

    name: str
    label: str
    unit: Unit
    work: float
    rate: Rate
    launch: Callable[[int, Any], object]
    num_sets: int
    check: Check
    error_bound: float
    config: Any = None  # the kernel's own choice
    goal: Goal | None = None
    note: str = ""
    is_ours: bool = True  # what isn't may be unavailable here, which is no failure

    def calls(self) -> list[Call]:
        return [partial(self.launch, index, self.config) for index in range(self.num_sets)]


Group = Callable[[Setting], Sequence[Case]]


def measure_groups(groups: Sequence[Group], setting: Setting) -> Iterator[Measurement]:
    """One group after another; one that can't be set up costs no other.

    Each case comes twice, at first without seconds: whatever becomes of the process, it is known.
    """
    for group in groups:
        try:
            cases = group(setting)
        except Exception as error:  # whatever a kernel's file may raise
            label = group.__name__.strip("_").replace("_", " ")
            yield Measurement(name=label, label=label, unit="us", work=0.0, failure=_reason(error))
            continue
        yield from map(_measurement, cases)
        yield from measure(cases, setting)
        del cases
        if not setting.is_dry:
            torch.cuda.empty_cache()


def measure(
    cases: Sequence[Case], setting: Setting, *, may_spill: bool = True
) -> Iterator[Measurement]:
    """All of `cases`, in turns within each round; what is wrong or fails gets no figure."""
    timed: list[tuple[Case, Sample, Measurement]] = []
    for case in cases:
        found = _checked(case, _measurement(case), setting)
        if not may_spill and any(build.spilled_words for build in found.builds):
            found = msgspec.structs.replace(found, failure="spills registers")
        if setting.rounds and not found.failure and not found.unavailable:
            try:
                sample, timed_by = make_sample(case.calls(), setting)
            except Exception as error:
                found = msgspec.structs.replace(found, failure=_reason(error))
            else:
                timed.append((case, sample, msgspec.structs.replace(found, timed_by=timed_by)))
                continue
        yield found
    # The first rounds warm the clocks up and count for nothing.
    num_rounds = setting.num_warmups + setting.rounds
    rounds = [[sample() for _, sample, _ in timed] for _ in range(num_rounds)]
    for index, (case, _, found) in enumerate(timed):
        seconds = tuple(samples[index] for samples in rounds[setting.num_warmups :])
        yield _checked(case, msgspec.structs.replace(found, seconds=seconds), setting)


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Of the norm; infinite where the result isn't finite."""
    if not bool(result.isfinite().all()):
        return math.inf
    wide = reference.double()
    return float((result.double() - wide).norm() / wide.norm().clamp_min(1e-300))


def mismatch(result: torch.Tensor, reference: torch.Tensor) -> float:
    """The share of values that differ at all."""
    return float((result != reference).sum()) / max(1, result.numel())


@contextlib.contextmanager
def recording_builds(builds: list[Build]) -> Iterator[None]:
    """What the launches inside were compiled to; nothing under the interpreter."""
    run = JITFunction.run

    def recorded(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        built = run(self, *args, grid=grid, warmup=warmup, **kwargs)
        with contextlib.suppress(AttributeError):  # what another Triton may call otherwise
            builds.append(_read(built, grid, kwargs))
        return built

    JITFunction.run = recorded
    try:
        yield
    finally:
        JITFunction.run = run


def _measurement(case: Case) -> Measurement:
    return Measurement(
        name=case.name,
        label=case.label,
        unit=case.unit,
        work=case.work,
        rate=case.rate,
        goal=case.goal,
        error_bound=case.error_bound,
        note=case.note,
    )


def _checked(case: Case, found: Measurement, setting: Setting) -> Measurement:
    """`found` with the larger of the errors so far; without figures if that is too large."""
    builds: list[Build] = []
    try:
        with recording_builds(builds):
            error = max(case.check(case.calls()[0]), found.relative_error or 0.0)
        synchronize(setting)
    except Exception as raised:
        if not case.is_ours:
            return msgspec.structs.replace(found, seconds=(), unavailable=_reason(raised))
        return msgspec.structs.replace(found, seconds=(), failure=_reason(raised))
    found = msgspec.structs.replace(
        found, relative_error=error if math.isfinite(error) else None, builds=tuple(builds)
    )
    if error <= case.error_bound:
        return found
    failure = f"wrong: relative error {error:.3g}, bound {case.error_bound:.3g}"
    return msgspec.structs.replace(found, seconds=(), failure=failure)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:600]


def _read(built: Any, grid: Any, arguments: Mapping[str, Any]) -> Build:
    chip = torch.cuda.get_device_properties(torch.cuda.current_device())
    meta = built.metadata
    # Registers go to warps in units of 256: CUDA's occupancy calculator.
    registers = -(-built.n_regs * 32 // 256) * 256 * meta.num_warps
    blocks_per_sm = min(
        REGISTERS_PER_SM // registers,
        chip.shared_memory_per_multiprocessor // (meta.shared + RESERVED_SHARED_BYTES),
        chip.max_threads_per_multi_processor // (32 * meta.num_warps),
    )
    return Build(
        kernel=meta.name,
        grid=tuple(grid) if isinstance(grid, tuple | list) else (),
        registers=built.n_regs,
        spilled_words=built.n_spills,
        shared_bytes=meta.shared,
        num_warps=meta.num_warps,
        num_stages=meta.num_stages,
        blocks_per_sm=blocks_per_sm,
        # By the kernels' convention their options are in capitals.
        constants={name: str(value) for name, value in arguments.items() if name.isupper()},
        instructions=tuple(
            name for name, text in _INSTRUCTIONS.items() if text in built.asm["ptx"]
        ),
    )
