"""Programs in sections: each in a process of its own with a time limit, figures as JSON lines.

The figures of a section that failed, hung or was killed are kept, and the others go on.
"""

import dataclasses
import pkgutil
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tandem.bench.report.console import print_figures, say
from tandem.bench.report.document import document, utc_now, write_document
from tandem.bench.report.figures import Figure, Rate, per_second, table
from tandem.bench.report.options import option
from tandem.bench.report.process import (
    UnderLoad,
    gpu_state,
    printing_lines,
    run_bounded,
    watching_gpu,
)
from tandem.bench.report.setting import chip, gpu_id, gpu_name, is_cpu, setting_for

RESULTS = Path(__file__).resolve().parents[1] / "results"
MAX_REASON = 600  # characters
MAX_LOG = 4000  # of each in the document; the whole ones lie in a file beside it
DRY_PATIENCE = 4.0  # times the limit of a section, for a machine that does other work too


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a run in a process of its own.

    `entry` is "module:function"; the function takes a Setting and yields figures, also as a
    coroutine does.
    """

    name: str
    entry: str
    timeout_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    is_optional: bool = False  # of a kernel on trial: its failures fail no run
    only_named: bool = False  # runs with --only alone


@dataclass(frozen=True, slots=True)
class SectionProgram:
    """The sections of `python -m module`, their definitions and the time for all of them."""

    module: str
    results: str  # name of the file in bench/results/GPU
    sections: Sequence[Section]
    how: Mapping[str, str]
    budget_s: float
    once_rounds: int = 0  # with --once; 0: results are checked and nothing is timed
    derive: Callable[[Sequence[Figure]], Iterable[Figure]] = lambda _: ()  # from the others


@dataclass(frozen=True, slots=True)
class SectionOptions:
    """Measure one GPU in sections; each has a process and a time limit of its own."""

    device: str = option("cuda:0", "cpu: a dry run, tiny and meaningless")
    output: Path | None = option(None, "JSON document; default: in bench/results/GPU")
    commit: str = option("", "commit of the code, where there is no git")
    only: tuple[str, ...] = option((), "names of the sections to run")
    once: bool = option(False, "a quick look, or single launches for a profiler")
    section: str = option("", "a section to run in this process, as JSON lines")
    budget: float | None = option(None, "seconds for all sections", least=1)


@dataclass(slots=True)
class Findings:
    """The figures of the sections, in their order."""

    figures: list[Figure] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    under_load: dict[str, UnderLoad] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)  # of the sections, whole
    has_failed: bool = False


def run_sections(program: SectionProgram, options: SectionOptions) -> int:
    """Run a program's sections, print and write their figures; return 1 when one failed."""
    known = [section.name for section in program.sections]
    for name in (*options.only, *filter(None, [options.section])):
        if name not in known:
            say(f"error: {name!r} is not one of the sections {', '.join(known)}")
            return 2
    if options.section:
        _measure_here(program, options)
        return 0
    for line in _out_of_reach(program, options):
        say(line)
    started_at, before = utc_now(), gpu_state(gpu_id(options.device))
    output = options.output or results_path(gpu_name(options.device), program.results)
    findings, figures = Findings(), list[Figure]()
    for _ in _measure_sections(program, options, findings):
        figures = judged(findings.figures, is_dry=is_cpu(options.device))
        figures += judged(program.derive(figures), is_dry=is_cpu(options.device))
        failures = {each.name: each.failure for each in figures if each.failure}
        # After every section: a run that is cut loses the section under way, and no other.
        whole = document(
            command=["python", "-m", program.module, *sys.argv[1:]],
            settings=dataclasses.asdict(options),
            started_at=started_at,
            how=program.how,
            figures=figures,
            commit=options.commit,
            is_dry=is_cpu(options.device),
            chip=chip(options.device),
            gpu_before=before,
            gpu_after=gpu_state(gpu_id(options.device)),
            gpu_under_load=findings.under_load,
            section_seconds=findings.seconds,
            section_logs={name: log[-MAX_LOG:] for name, log in findings.logs.items()},
            ceilings_per_s=best_rates(findings.figures),
            failures=findings.failures | failures,
        )
        write_document(output, whole)
        _write_logs(output.with_suffix(".log"), findings.logs)
    print_figures(figures, program.how)
    _print_run(options, findings)
    print(output)
    return int(findings.has_failed)


def _chosen(program: SectionProgram, options: SectionOptions) -> list[Section]:
    return [
        section
        for section in program.sections
        if (section.name in options.only if options.only else not section.only_named)
    ]


def _out_of_reach(program: SectionProgram, options: SectionOptions) -> Iterator[str]:
    """Yield a line for each section that those before it can keep from its time."""
    budget_s, needed_s = options.budget or program.budget_s, 0.0
    for section in _chosen(program, options):
        needed_s += section.timeout_s
        if needed_s > budget_s:
            yield (
                f"{section.name} may be cut: it and those before it may take {needed_s:.0f} s, "
                f"the budget is {budget_s:.0f} s"
            )


def _write_logs(path: Path, logs: Mapping[str, str]) -> None:
    """Write whole logs into one file: a machine that is lent may give few files back."""
    if logs:
        parts = (f"==> {name} <==\n{log}\n" for name, log in logs.items())
        path.write_text("\n".join(parts), encoding="utf-8")


def judged(figures: Iterable[Figure], *, is_dry: bool) -> list[Figure]:
    """Return the figures with the ceilings of their run; those of a dry run have no targets."""
    found = list(figures)
    rates = best_rates(found)
    found = [figure.with_ceiling(rates) for figure in found]
    return [msgspec.structs.replace(each, target=None) for each in found] if is_dry else found


def best_rates(figures: Iterable[Figure]) -> dict[Rate, float]:
    """Return the device's rates per second: the best of the figures that are named after each."""
    rates: dict[Rate, float] = {}
    for figure in figures:
        bound = figure.bound
        if bound is not None and figure.samples and figure.name.startswith(f"{bound.rate}_"):
            rates[bound.rate] = max(per_second(figure), rates.get(bound.rate, 0.0))
    return rates


def results_path(gpu: str | None, file_name: str) -> Path:
    """Return `bench/results/GPU/file_name`: the GPU in lower case and dashes, "cpu" for None."""
    folder = re.sub(r"[^a-z0-9]+", "-", (gpu or "cpu").lower()).strip("-")
    return RESULTS / folder / file_name


def reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_REASON]


def _measure_sections(
    program: SectionProgram, options: SectionOptions, findings: Findings
) -> Iterator[None]:
    """Add the sections to `findings`; yield after each."""
    deadline = time.perf_counter() + (options.budget or program.budget_s)
    for section in _chosen(program, options):
        started_at = time.perf_counter()
        load: list[UnderLoad] = []
        with watching_gpu(gpu_id(options.device), load):
            found, failure, log = in_own_process(
                program.module, section, options, deadline - started_at
            )
        known = {each.name for each in findings.figures}
        found = [_named_after(section, each) if each.name in known else each for each in found]
        findings.figures += found
        if log:
            findings.logs[section.name] = log
        findings.seconds[section.name] = time.perf_counter() - started_at
        if load:
            findings.under_load[section.name] = load[0]
        if failure:
            findings.failures[section.name] = failure
        if not section.is_optional:
            findings.has_failed |= bool(failure) or any(each.failure for each in found)
        say(f"{section.name}: {findings.seconds[section.name]:.1f} s, {len(found)} figures")
        if found or failure:
            lines = table(judged(found, is_dry=is_cpu(options.device)))
            say("\n".join(filter(None, [lines, failure])))
        yield


def _named_after(section: Section, figure: Figure) -> Figure:
    """Return a figure that another section has too, with a name and a label of its own."""
    name, label = f"{section.name}_{figure.name}", f"{figure.label} ({section.name})"
    return msgspec.structs.replace(figure, name=name, label=label)


def in_own_process(
    module: str, section: Section, options: SectionOptions, seconds_left: float
) -> tuple[list[Figure], str, str]:
    """Return a section's figures up to its end, the reason of an early end, and its log."""
    patience = DRY_PATIENCE if is_cpu(options.device) else 1.0
    timeout_s = min(section.timeout_s * patience, seconds_left)
    if timeout_s <= 0:
        return [], "no time was left", ""
    command = [sys.executable, "-m", module, "--device", options.device, "--section", section.name]
    command += ["--once"] if options.once else []
    # Triton reads it when it is imported.
    interprets = {"TRITON_INTERPRET": "1" if is_cpu(options.device) else "0"}
    ended = run_bounded(command, timeout_s, {**interprets, **section.environment})
    # A case is announced before it is measured.
    found = list({figure.name: figure for figure in ended.lines(Figure)}.values())
    log = ended.errors.strip()
    if ended.code is None:
        return found, f"took more than {timeout_s:.0f} s", log
    if ended.code:
        return found, f"exit {ended.code}: {log[-MAX_REASON:]}", log
    return found, "", log


def _measure_here(program: SectionProgram, options: SectionOptions) -> None:
    """Measure one section in this process; print each figure as it comes."""
    setting = setting_for(options.device)
    if options.once:
        setting = setting.once(program.once_rounds)
    (section,) = (each for each in program.sections if each.name == options.section)
    found = pkgutil.resolve_name(section.entry)(setting)
    with printing_lines() as print_figure:
        if isinstance(found, AsyncIterator):
            import uvloop  # kernels are measured on machines without it

            uvloop.run(_print_all(found, print_figure))
        else:
            for figure in found:
                print_figure(figure)


async def _print_all(found: AsyncIterator[Figure], print_figure: Callable[[Figure], None]) -> None:
    async for figure in found:
        print_figure(figure)


def _print_run(options: SectionOptions, findings: Findings) -> None:
    if is_cpu(options.device):
        print("a dry run: all sizes are tiny and no figure means anything")
    for name, load in findings.under_load.items():
        print(
            f"under load, {name}: SM {load.sm_mhz:.0f} MHz (least {load.min_sm_mhz:.0f}), "
            f"{load.power_w:.0f} W (most {load.max_power_w:.0f}), {load.max_temperature_c:.0f} C"
        )
    for name, failure in findings.failures.items():
        print(f"{name} gave no figure: {failure}")
