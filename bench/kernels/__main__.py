"""The kernels on one GPU: tested, then measured against the chip's ceilings and their targets.

On a machine without this package installed, from the repository's root:

make typing-links && PYTHONPATH=build/typing:$PYTHONPATH python3 -m tandem.bench.kernels
"""

import argparse
import importlib.util
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.bench.kernels.figures import (
    Figure,
    Goal,
    builds_table,
    results_path,
    to_figure,
    versus,
)
from tandem.bench.kernels.process import TestRun, gpu_state, run_tests
from tandem.bench.kernels.timing import setting_for
from tandem.bench.report.figures import utc_now
from tandem.bench.report.sections import (
    Findings,
    Section,
    best_rates,
    document,
    gpu_id,
    gpu_name,
    is_cpu,
    main_of_section,
    measure_sections,
    print_failures,
    print_figures,
    say,
    write_document,
)

PROGRAM = "tandem.bench.kernels"
SCHEMA_VERSION = 1
BUDGET_S = 345.0  # of a whole run, so that it ends within six minutes
TESTS_TIMEOUT_S = 130.0
NUM_TEST_PROCESSES = 14  # they compile for most of the time
# Of the kernel on trial. It may hang, and then must cost nothing else: it goes last, on its own.
TRIAL_TESTS = "test_prefill_attention_hopper.py"
TRIAL_TESTS_TIMEOUT_S = 45.0
MAX_PRINTED_TESTS = 12
ROOT = Path(__file__).resolve().parents[2]
HOW = {
    "time": "median of rounds; in a round all that compare take turns; a sample is one replay of a "
    "CUDA graph of many calls, divided by their number; inputs are random and go in turns, so that "
    "no cache holds them",
    "limit": "the ceiling of the same run (the best of the library's and our own plain kernel), or "
    "the floor of a time: the bytes that must move over that ceiling",
    "ratio": "share of the ceiling, or floor over time",
    "error": "of the norm, against float64 or a float32 twin, on the measured shape, before and "
    "after; what is over the bound gets no figure",
    "flops": "4 * heads * head_dim for every position that a query sees",
    "passes": "time over that of reading the logits once at the read ceiling",
}


SECTIONS = (
    Section("ceilings", "tandem.bench.kernels.ceilings", 45.0),
    Section("prefill", "tandem.bench.kernels.prefill", 75.0),
    Section("decode", "tandem.bench.kernels.decode", 60.0),
    Section("layers", "tandem.bench.kernels.layers", 45.0),
    Section("blocks", "tandem.bench.kernels.blocks", 45.0),
    Section("sampling", "tandem.bench.kernels.sampling", 45.0),
    Section("prefill_hopper", "tandem.bench.kernels.prefill_hopper", 40.0, is_optional=True),
)


def against_torch(figures: Sequence[Figure], *, is_dry: bool) -> Iterator[Figure]:
    """Whole prompts against the fastest of torch's backends at their length."""
    for ours in figures:
        whole = re.fullmatch(r"prefill_(?:hopper_)?dense_(\w+)_block(?:64|128)", ours.name)
        if whole is None or ours.value is None:
            continue
        theirs = [
            figure
            for figure in figures
            if re.fullmatch(rf"sdpa_[a-z]+_{whole[1]}", figure.name) and figure.value is not None
        ]
        if theirs:
            best = max(theirs, key=lambda figure: figure.value or 0.0)
            label = f"{ours.label} / {best.label}"
            yield versus(f"{ours.name}_vs_sdpa", label, ours, best, goal=Goal(1.0), is_dry=is_dry)


def run_kernel_tests(device: str, seconds: float, *, of_trial: bool = False) -> TestRun:
    """The kernels' tests on this device, or those of the one on trial; on a CPU one family's."""
    folder = ROOT / "tests" / "kernels"
    if not folder.is_dir():
        return TestRun("there are no tests beside this package", False)
    # Versions here may be other ones than those the project is developed with, and warn otherwise.
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=line", "-W", "default"]
    command += ["-p", "no:cacheprovider", f"--rootdir={ROOT}", "-c", f"{ROOT}/pyproject.toml"]
    if is_cpu(device):
        command.append(f"{folder}/test_embedding.py")
    elif of_trial:
        command.append(f"{folder}/{TRIAL_TESTS}")
    else:
        command += [str(folder), f"--ignore={folder}/{TRIAL_TESTS}"]
        if importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(NUM_TEST_PROCESSES), "--dist", "worksteal"]
    timeout_s = min(TRIAL_TESTS_TIMEOUT_S if of_trial else TESTS_TIMEOUT_S, seconds)
    return run_tests(command, timeout_s, {"OMP_NUM_THREADS": "1"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and writes the JSON; 1 when a test failed or anything gave no figure."""
    options = _parser().parse_args(arguments)
    device = options.device
    if options.section:
        setting = setting_for(device)
        if options.once:
            setting = replace(setting, rounds=0)
        return main_of_section(SECTIONS, options.section, setting)
    started_at, begin = utc_now(), time.perf_counter()
    is_dry, before = is_cpu(device), gpu_state(gpu_id(device))
    tests = None
    if not options.no_tests:
        tests = run_kernel_tests(device, BUDGET_S)
        say(f"tests: {tests.summary}")
    sections = [each for each in SECTIONS if not options.only or each.name in options.only]
    findings = measure_sections(PROGRAM, sections, device, begin + BUDGET_S)
    trial_tests = None
    seconds_left = begin + BUDGET_S - time.perf_counter()
    if not (options.no_tests or is_dry) and seconds_left > 0:
        trial_tests = run_kernel_tests(device, seconds_left, of_trial=True)
        say(f"tests of the kernel on trial: {trial_tests.summary}")
    ceilings = best_rates(findings.measurements)
    figures = [to_figure(each, ceilings, is_dry=is_dry) for each in findings.measurements]
    figures += against_torch(figures, is_dry=is_dry)
    _print_all(figures, findings, tests)
    whole: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        **document(
            command=["python", "-m", PROGRAM, *(arguments or sys.argv[1:])],
            commit=options.commit,
            device=device,
            started_at=started_at,
            how=HOW,
            findings=findings,
            figures=figures,
        ),
        "gpu_before": before,
        "gpu_after": gpu_state(gpu_id(device)),
        "tests": tests,
        "trial_tests": trial_tests,
    }
    output = options.output or results_path(gpu_name(device), "kernels.json")
    write_document(whole, output)
    print(output)
    say(f"{time.perf_counter() - begin:.0f} s in all")
    return 1 if findings.has_failed or (tests is not None and not tests.has_passed) else 0


def _print_all(figures: Sequence[Figure], findings: Findings, tests: TestRun | None) -> None:
    if any(figure.measurement and figure.measurement.builds for figure in figures):
        print(builds_table(figures), end="\n\n")
    print_figures(figures, findings)
    if tests is not None:
        print(f"tests: {tests.summary}", *tests.failed[:MAX_PRINTED_TESTS], sep="\n  ")
    print_failures(figures, findings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tandem.bench.kernels")
    parser.add_argument("--device", default="cuda:0", help="cpu: a dry run, tiny and meaningless")
    parser.add_argument("--output", type=Path, help="default: bench/results/GPU/kernels.json")
    parser.add_argument("--commit", default="", help="of the code, where there is no git")
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    names = [section.name for section in SECTIONS]
    parser.add_argument("--only", nargs="+", choices=names, help="these sections only")
    parser.add_argument("--section", choices=names, help="in this process, as JSON lines")
    parser.add_argument("--once", action="store_true", help="check a section only, for a profiler")
    return parser


if __name__ == "__main__":
    sys.exit(main())
