"""Cases to measure: each checked before and after, timed in turns, its compiled kernels read."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
import torch

from tandem.bench.kernels.compile import Launch, recording_launches
from tandem.bench.report.figures import Bound, Figure, Rate, Target, in_unit
from tandem.bench.report.sections import reason_of
from tandem.bench.report.setting import Setting, seconds_of, synchronize

Call = Callable[[], object]
Sample = Callable[[], float]  # seconds of one call, measured anew
Check = Callable[[Call], float]

# Of the norm. Outputs are rounded once or twice, and so are the weights of an attention: some
# units of the type. A tile or a row that is missing is far above all of these.
ERROR_BOUNDS = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 1e-2}
MAX_CALLS_IN_SAMPLE = 256
HEAD_START_CYCLES = 20_000_000  # some 10 ms in which the host queues the calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call to measure: the same work on `num_sets` sets of inputs.

    `launch(index, config)` runs it on one set in one configuration of its kernel. `check(run)`
    poisons the outputs of the first set, calls run() to launch on it, and returns the relative
    error. `work` is in operations for TFLOP/s, else in bytes.
    """

    name: str
    label: str
    unit: Literal["TFLOP/s", "TB/s", "us"] = "us"
    work: float
    rate: Rate = "read"
    launch: Callable[[int, Any], object]
    num_sets: int = 1
    check: Check
    error_bound: float = 0.0
    config: Any = None  # the kernel's own choice
    target: Target | None = None
    notes: tuple[str, ...] = ()
    is_ours: bool = True  # a library's call may be unavailable, which is no failure

    def calls(self) -> list[Call]:
        return [partial(self.launch, index, self.config) for index in range(self.num_sets)]

    def figure(self) -> Figure:
        """Return the figure without samples."""
        bound = Bound(self.rate, self.work if self.unit == "us" else 1.0)
        return Figure(
            self.name, self.label, self.unit, target=self.target, bound=bound, notes=self.notes
        )


Group = Callable[[Setting], Sequence[Case]]


def measure_groups(groups: Mapping[str, Group], setting: Setting) -> Iterator[Figure]:
    """Measure one group after another; one that can't be set up is named and costs no other.

    Each case comes twice, at first without samples: it is known whatever ends the process.
    """
    for name, group in groups.items():
        try:
            cases = group(setting)
        except Exception as error:  # whatever a kernel's file may raise
            yield Figure(name, name, "us", failure=reason_of(error))
            continue
        yield from (case.figure() for case in cases)
        yield from measure(cases, setting)
        del cases
        if not setting.is_dry:
            torch.cuda.empty_cache()


def measure(cases: Sequence[Case], setting: Setting, *, may_spill: bool = True) -> Iterator[Figure]:
    """Measure the cases in turns within each round; a wrong one gets no figure."""
    timed: list[tuple[Case, Sample, Figure]] = []
    for case in cases:
        figure, launches = _checked(case, case.figure(), setting)
        if not may_spill and any(launch.spilled_words for launch in launches):
            figure = msgspec.structs.replace(figure, failure="spills registers")
        if setting.rounds and not figure.failure and figure.relative_error is not None:
            try:
                sample, note = make_sample(case.calls(), setting)
            except Exception as error:
                figure = msgspec.structs.replace(figure, failure=reason_of(error))
            else:
                notes = (*case.notes, *filter(None, [note]))
                timed.append((case, sample, msgspec.structs.replace(figure, notes=notes)))
                continue
        yield figure
    # The first rounds warm the clocks up and count for nothing.
    num_rounds = setting.num_warmups + setting.rounds
    rounds = [[sample() for _, sample, _ in timed] for _ in range(num_rounds)]
    for index, (case, _, figure) in enumerate(timed):
        seconds = [samples[index] for samples in rounds[setting.num_warmups :]]
        samples = in_unit(seconds, case.unit, case.work)
        yield _checked(case, msgspec.structs.replace(figure, samples=samples), setting)[0]


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the error of the norm; infinite where the result isn't finite."""
    if not bool(result.isfinite().all()):
        return math.inf
    wide = reference.double()
    return float((result.double() - wide).norm() / wide.norm().clamp_min(1e-300))


def mismatch(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the share of values that differ at all."""
    return float((result != reference).sum()) / max(1, result.numel())


def make_sample(calls: Sequence[Call], setting: Setting) -> tuple[Sample, str]:
    """Return a function that times `calls` in turns, and a note where no CUDA graph does it.

    The calls have run once already.
    """
    if setting.is_dry:
        return lambda: seconds_of(partial(_run_all, calls)) / len(calls), ""
    once_s = _events(calls)()  # launches included: an upper limit
    passes = math.ceil(setting.sample_s / (once_s * len(calls)))
    many = list(calls) * max(1, min(passes, MAX_CALLS_IN_SAMPLE // len(calls)))
    try:
        return _graph(many), ""
    except RuntimeError:
        torch.cuda.synchronize()
        return _events(many), f"timed by events around {len(many)} calls, not by a CUDA graph"


def _checked(case: Case, figure: Figure, setting: Setting) -> tuple[Figure, list[Launch]]:
    """Return `figure` with the larger of the errors so far; without samples if that is too large.

    The launches of the check are read, and noted.
    """
    launches: list[Launch] = []
    try:
        with recording_launches(launches):
            error = max(case.check(case.calls()[0]), figure.relative_error or 0.0)
        synchronize(setting)
    except Exception as raised:
        if case.is_ours:
            return msgspec.structs.replace(figure, samples=(), failure=reason_of(raised)), []
        notes = (*case.notes, f"unavailable: {reason_of(raised)}")
        return msgspec.structs.replace(figure, samples=(), notes=notes), []
    notes = (*figure.notes, *(launch.text for launch in launches if figure.samples))
    known = error if math.isfinite(error) else None
    figure = msgspec.structs.replace(figure, relative_error=known, notes=notes)
    if error <= case.error_bound:
        return figure, launches
    failure = f"wrong: relative error {error:.3g}, bound {case.error_bound:.3g}"
    return msgspec.structs.replace(figure, samples=(), failure=failure), launches


def _graph(calls: Sequence[Call]) -> Sample:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _run_all(calls)
    graph.replay()
    torch.cuda.synchronize()
    return lambda: between_events(graph.replay) / len(calls)


def _events(calls: Sequence[Call]) -> Sample:
    def sample() -> float:
        torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        return between_events(partial(_run_all, calls)) / len(calls)

    return sample


def _run_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def between_events(run: Call) -> float:
    """Return the seconds that the device takes for a call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
