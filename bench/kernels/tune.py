"""The choice of each kernel's configuration on the chip at hand; nothing of it runs while serving.

python -m tandem.bench.kernels.tune [--family F ...] [--seconds S] [--output tuned.json]
"""

import contextlib
import inspect
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch

from tandem.bench.kernels.cases import Case, measure
from tandem.bench.kernels.compile import Lookup, recording_lookups
from tandem.bench.kernels.shapes import FAMILIES, GROUP_SIZE, Tunable
from tandem.bench.report.figures import Figure
from tandem.bench.report.options import option, parse
from tandem.bench.report.process import print_lines, run_bounded
from tandem.bench.report.setting import Setting, setting_for
from tandem.kernels.tuned import TABLE, TABLE_VARIABLE, architecture, shape_key
from tandem.runtime.errors import ConfigError

MODULE = "tandem.bench.kernels.tune"
LEAST_GAIN = 0.01  # less than this is noise, and the table's line stays
NUM_COMPILERS = 8
COMPILE_SHARE = 0.4  # of the time, at most
# Shares of the time: these have many candidates, and decide about most of a step.
WEIGHTS = {
    "prefill_attention": 4.0,
    "prefill_attention_hopper": 3.0,
    "paged_attention": 4.0,
    "linear": 3.0,
    "sampling": 2.0,
}
TINY_CANDIDATES = 2  # of each kernel in a dry run

Table = dict[str, dict[str, dict[str, dict[str, Any]]]]


class Choice(msgspec.Struct, frozen=True):
    """The configuration chosen for one kernel at one shape; times are medians of one call."""

    arch: int
    kernel: str
    shape: str
    label: str
    old: dict[str, Any]
    new: dict[str, Any]
    old_s: float | None  # None: the old one is wrong, spills or fails
    new_s: float
    num_measured: int
    rejected: dict[str, str]  # configuration |-> why


def tune_family(family: str, setting: Setting) -> Iterator[Choice]:
    """Yield the best configuration for every shape of a family."""
    for tunable in _tunables(family, setting):
        case = tunable.make()
        kernel, shape, current = looked_up(tunable.module, case)
        configs = {shape_of(one): one for one in configurations(tunable, shape, current, setting)}
        cases = [replace(case, name=name, config=config) for name, config in configs.items()]
        found = list(measure(cases, setting, may_spill=False))
        times = {each.name: _seconds(case, each) for each in found if each.samples}
        if not times:
            raise RuntimeError(f"{tunable.label}: nothing works: {found[0].failure}")
        old_s, best = times.get(shape_of(current)), min(times, key=times.__getitem__)
        if old_s is not None and times[best] > old_s * (1 - LEAST_GAIN):
            best = shape_of(current)
        yield Choice(
            arch=architecture(),
            kernel=kernel,
            shape=shape_key(**shape),
            label=tunable.label,
            old=asdict(current),
            new=asdict(configs[best]),
            old_s=old_s,
            new_s=times[best],
            num_measured=len(times),
            rejected={each.name: each.failure for each in found if each.failure},
        )
        del case, cases
        if not setting.is_dry:
            torch.cuda.empty_cache()


def _seconds(case: Case, figure: Figure) -> float:
    """Return the seconds of one call."""
    value = figure.value
    assert value is not None
    return value * 1e-6 if case.unit == "us" else case.work / (value * 1e12)


def compile_family(family: str, setting: Setting, part: int, num_parts: int) -> None:
    """Run every `num_parts`th configuration once, so that the compiler's cache has it."""
    for tunable in _tunables(family, setting):
        case = tunable.make()
        _, shape, current = looked_up(tunable.module, case)
        for config in list(configurations(tunable, shape, current, setting))[part::num_parts]:
            with contextlib.suppress(Exception):  # it will fail again where that is reported
                case.launch(0, config)


def _tunables(family: str, setting: Setting) -> Iterator[Tunable]:
    """Yield all shapes of a family; in a dry run one."""
    yield from islice(FAMILIES[family](setting), 1 if setting.is_dry else None)


def looked_up(module: ModuleType, case: Case) -> Lookup:
    """Return the look-up of the kernel in the table: its configuration there is the present one."""
    with recording_lookups(module) as asked:
        case.launch(0, None)
    return asked[0]


def configurations(
    tunable: Tunable, shape: dict[str, Any], current: Any, setting: Setting
) -> Iterator[Any]:
    """Yield the current one, and the family's candidates for the shape."""
    yield current
    if tunable.variants is not None:
        yield from tunable.variants(current)
        return
    known = {**shape, "arch": architecture(), "group_size": GROUP_SIZE}
    wanted = inspect.signature(tunable.module.candidates).parameters
    found = list(tunable.module.candidates(**{name: known[name] for name in wanted}))
    yield from found[:TINY_CANDIDATES] if setting.is_dry else found


def shape_of(config: Any) -> str:
    """Return a configuration as a short text."""
    return shape_key(**asdict(config))


def merged(table: Table, choices: Sequence[Choice]) -> Table:
    """Return the table with the choices in their lines, and all else as it was."""
    lines = {
        arch: {kernel: dict(rows) for kernel, rows in of.items()} for arch, of in table.items()
    }
    for choice in choices:
        rows = lines.setdefault(f"sm_{choice.arch}", {}).setdefault(choice.kernel, {})
        # A kept line must not undo a change by another family of the same kernel.
        if choice.new != choice.old or choice.shape not in rows:
            rows[choice.shape] = choice.new
    return lines


def table_text(table: Table) -> str:
    """Return the table as JSON, a line for each shape."""
    archs = []
    for arch, kernels in table.items():
        families = []
        for kernel, rows in kernels.items():
            lines = [f"   {json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items()]
            families.append(f"  {json.dumps(kernel)}: " + _braces(lines, "  "))
        archs.append(f" {json.dumps(arch)}: " + _braces(families, " "))
    return _braces(archs, "") + "\n"


def _braces(items: Sequence[str], indent: str) -> str:
    return "{\n" + ",\n".join(items) + f"\n{indent}}}" if items else "{}"


@dataclass(frozen=True, slots=True)
class Options:
    """Choose the configurations of kernels on the chip at hand, and write them into the table."""

    device: str = option("cuda:0", "cpu: a dry run that writes nothing")
    family: tuple[str, ...] = option((), f"of {', '.join(FAMILIES)} (default: all)")
    seconds: float = option(540.0, "for all of them together")
    output: Path = option(TABLE, "table to write")
    compile: str = option("", "compile a part of the candidates", is_hidden=True)
    child: bool = option(False, "tune one family in this process", is_hidden=True)

    def __post_init__(self) -> None:
        for name in self.family:
            if name not in FAMILIES:
                raise ConfigError(f"{name!r} is not one of {', '.join(FAMILIES)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print old and new for each shape and write the table; 1 when a family failed."""
    options = parse(Options, MODULE, arguments)
    families = options.family or tuple(FAMILIES)
    setting = setting_for(options.device)
    if options.compile:
        part, num_parts = map(int, options.compile.split("/"))
        compile_family(families[0], setting, part, num_parts)
        return 0
    if options.child:
        print_lines(tune_family(families[0], setting))
        return 0
    deadline = time.perf_counter() + options.seconds
    choices: list[Choice] = []
    has_failed = False
    if not setting.is_dry:
        options.output.write_text(table_text(json.loads(TABLE.read_text())))
    for index, family in enumerate(families):
        share = _weight(family) / sum(map(_weight, families[index:]))
        seconds = (deadline - time.perf_counter()) * share
        found, failure = _tune_in_own_process(family, options, seconds, setting)
        choices += found
        if not setting.is_dry:
            # After every family: the next ones build on it, and a run that is cut loses one.
            table = merged(json.loads(TABLE.read_text()), choices)
            options.output.write_text(table_text(table))
        for choice in found:
            print(_line(choice), flush=True)
        if failure:
            has_failed = True
            print(f"{family}: {failure}", flush=True)
    if not setting.is_dry:
        print(options.output)
    return int(has_failed)


def _weight(family: str) -> float:
    return WEIGHTS.get(family, 1.0)


def _tune_in_own_process(
    family: str, options: Options, seconds: float, setting: Setting
) -> tuple[list[Choice], str]:
    command = [sys.executable, "-m", MODULE, "--device", options.device]
    command += ["--family", family]
    environment = {"TRITON_INTERPRET": "1" if setting.is_dry else "0"}
    if not setting.is_dry:
        environment[TABLE_VARIABLE] = str(options.output.resolve())
    ends_at = time.perf_counter() + seconds

    def compile_part(part: int) -> None:
        compiling = [*command, "--compile", f"{part}/{NUM_COMPILERS}"]
        run_bounded(compiling, seconds * COMPILE_SHARE, environment)

    if not setting.is_dry:
        with ThreadPoolExecutor(NUM_COMPILERS) as pool:
            list(pool.map(compile_part, range(NUM_COMPILERS)))
    left = ends_at - time.perf_counter()
    ended = run_bounded([*command, "--child"], left, environment)
    found = ended.lines(Choice)
    if ended.code is None:
        return found, f"took more than {seconds:.0f} s: {len(found)} shapes were chosen"
    return found, f"exit {ended.code}: {ended.errors.strip()[-600:]}" if ended.code else ""


def _line(choice: Choice) -> str:
    old = "fails" if choice.old_s is None else f"{choice.old_s * 1e6:.1f} us"
    changed = [
        f"{name}={choice.old[name]} -> {value}"
        for name, value in choice.new.items()
        if choice.old[name] != value
    ]
    what = " ".join(changed) or "stays"
    counts = f"{choice.num_measured} measured, {len(choice.rejected)} rejected"
    return f"{choice.label}: {old} -> {choice.new_s * 1e6:.1f} us, {what} ({counts})"


if __name__ == "__main__":
    sys.exit(main())
