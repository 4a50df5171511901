"""The kernels on one GPU: tested, then measured against the chip's ceilings and their targets.

On a machine without this package installed, from the repository's root:

make typing-links && PYTHONPATH=build/typing:$PYTHONPATH python3 -m tandem.bench.kernels
"""

import argparse
import importlib
import importlib.util
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from tandem.bench.handoff_figures import machine, this_commit, utc_now
from tandem.bench.kernel_figures import (
    Figure,
    Goal,
    Measurement,
    Rate,
    builds_table,
    failures,
    results_path,
    table,
    to_figure,
    versus,
)
from tandem.bench.kernel_process import (
    TestRun,
    UnderLoad,
    gpu_state,
    run_bounded,
    run_tests,
    watching_gpu,
)
from tandem.bench.kernel_timing import setting_for

SCHEMA_VERSION = 1
BUDGET_S = 345.0  # of a whole run, so that it ends within six minutes
TESTS_TIMEOUT_S = 130.0
NUM_TEST_PROCESSES = 14  # they compile for most of the time
# Of the kernel on trial. It may hang, and then must cost nothing else: it goes last, on its own.
TRIAL_TESTS = "test_prefill_attention_hopper.py"
TRIAL_TESTS_TIMEOUT_S = 45.0
MAX_PRINTED_TESTS = 12
ROOT = Path(__file__).resolve().parents[1]
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


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the run that has its own process, so that its failure is its own."""

    name: str
    module: str
    timeout_s: float
    is_optional: bool = False  # of a kernel on trial: what fails in it fails no run


SECTIONS = (
    Section("ceilings", "tandem.bench.kernel_ceilings", 45.0),
    Section("prefill", "tandem.bench.kernel_prefill", 75.0),
    Section("decode", "tandem.bench.kernel_decode", 60.0),
    Section("layers", "tandem.bench.kernel_layers", 45.0),
    Section("blocks", "tandem.bench.kernel_blocks", 45.0),
    Section("sampling", "tandem.bench.kernel_sampling", 45.0),
    Section("prefill_hopper", "tandem.bench.kernel_prefill_hopper", 40.0, is_optional=True),
)


@dataclass(slots=True)
class Findings:
    """What the sections gave, in their order."""

    measurements: list[Measurement]
    failures: dict[str, str]
    seconds: dict[str, float]
    under_load: dict[str, UnderLoad]
    has_failed: bool = False


def measure_sections(sections: Sequence[Section], device: str, deadline: float) -> Findings:
    """Each section in a process of its own, until `deadline` of time.perf_counter()."""
    findings = Findings([], {}, {}, {})
    for section in sections:
        started_at = time.perf_counter()
        load: list[UnderLoad] = []
        with watching_gpu(_gpu_id(device), load):
            found, failure = in_own_process(section, device, deadline - started_at)
        findings.measurements += found
        findings.seconds[section.name] = time.perf_counter() - started_at
        if load:
            findings.under_load[section.name] = load[0]
        if failure:
            findings.failures[section.name] = failure
        if not section.is_optional:
            findings.has_failed |= bool(failure) or any(each.failure for each in found)
        _say(f"{section.name}: {findings.seconds[section.name]:.1f} s, {len(found)} figures")
    return findings


def in_own_process(
    section: Section, device: str, seconds_left: float
) -> tuple[list[Measurement], str]:
    """What the section found before its end, and why it ended if that was early."""
    timeout_s = min(section.timeout_s, seconds_left)
    if timeout_s <= 0:
        return [], "no time was left"
    command = [sys.executable, "-m", "tandem.bench.kernels", "--device", device]
    # Read when triton is imported.
    environment = {"TRITON_INTERPRET": "1" if _is_dry(device) else "0"}
    ended = run_bounded([*command, "--section", section.name], timeout_s, environment)
    # The last line is whole only where the process ended by itself.
    lines = [line for line in ended.output.splitlines(keepends=True) if line.endswith(b"\n")]
    measurements = (msgspec.json.decode(line, type=Measurement) for line in lines)
    # A case is announced before it is measured.
    found = list({each.name: each for each in measurements}.values())
    if ended.code is None:
        return found, f"took more than {timeout_s:.0f} s"
    if ended.code:
        return found, f"exit {ended.code}: {ended.errors.strip()[-600:]}"
    return found, ""


def best_rates(measurements: Sequence[Measurement]) -> dict[Rate, float]:
    """The ceilings: the best that was measured of each rate by the section for that."""
    rates: dict[Rate, float] = {}
    for each in measurements:
        if each.rate and each.seconds and each.name.startswith(f"{each.rate}_"):
            rate = each.work / statistics.median(each.seconds)
            rates[each.rate] = max(rate, rates.get(each.rate, 0.0))
    return rates


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
    if _is_dry(device):
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
    if options.section:
        return _main_of_section(options.section, options.device, once=options.once)
    started_at, begin = utc_now(), time.perf_counter()
    is_dry, gpu_id = _is_dry(options.device), _gpu_id(options.device)
    before = gpu_state(gpu_id)
    tests = None
    if not options.no_tests:
        tests = run_kernel_tests(options.device, BUDGET_S)
        _say(f"tests: {tests.summary}")
    sections = [each for each in SECTIONS if not options.only or each.name in options.only]
    findings = measure_sections(sections, options.device, begin + BUDGET_S)
    trial_tests = None
    seconds_left = begin + BUDGET_S - time.perf_counter()
    if not (options.no_tests or is_dry) and seconds_left > 0:
        trial_tests = run_kernel_tests(options.device, seconds_left, of_trial=True)
        _say(f"tests of the kernel on trial: {trial_tests.summary}")
    ceilings = best_rates(findings.measurements)
    figures = [to_figure(each, ceilings, is_dry=is_dry) for each in findings.measurements]
    figures += against_torch(figures, is_dry=is_dry)
    failed = {**findings.failures, **failures(figures)}
    _print_all(figures, findings, tests, failed)
    whole: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "started_at": started_at.isoformat(timespec="seconds"),
        "ended_at": utc_now().isoformat(timespec="seconds"),
        "command": ["python", "-m", "tandem.bench.kernels", *(arguments or sys.argv[1:])],
        "commit": options.commit or this_commit(),
        "is_dry": is_dry,
        "machine": machine(),
        "chip": _chip(options.device),
        "gpu_before": before,
        "gpu_after": gpu_state(gpu_id),
        "gpu_under_load": findings.under_load,
        "how": HOW,
        "section_seconds": findings.seconds,
        "tests": tests,
        "trial_tests": trial_tests,
        "ceilings_per_s": ceilings,
        "figures": {figure.name: figure for figure in figures},
        "failures": failed,
    }
    output = options.output or results_path(_gpu_name(options.device), "kernels.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")
    print(output)
    _say(f"{time.perf_counter() - begin:.0f} s in all")
    return 1 if findings.has_failed or (tests is not None and not tests.has_passed) else 0


def _main_of_section(name: str, device: str, *, once: bool) -> int:
    setting = setting_for(device)
    if once:
        setting = replace(setting, rounds=0)
    out = os.dup(1)
    os.dup2(2, 1)  # a library that prints must not print among the figures
    (section,) = (each for each in SECTIONS if each.name == name)
    with os.fdopen(out, "wb") as stream:
        for measurement in importlib.import_module(section.module).run(setting):
            stream.write(msgspec.json.encode(measurement) + b"\n")
            stream.flush()
    return 0


def _print_all(
    figures: Sequence[Figure],
    findings: Findings,
    tests: TestRun | None,
    failed: Mapping[str, str],
) -> None:
    if any(figure.measurement and figure.measurement.builds for figure in figures):
        print(builds_table(figures), end="\n\n")
    print(table(figures))
    if any(figure.status == "dry" for figure in figures):
        print("a dry run: all sizes are tiny and no figure means anything")
    for name, load in findings.under_load.items():
        print(
            f"under load, {name}: SM {load.sm_mhz:.0f} MHz (least {load.min_sm_mhz:.0f}), "
            f"{load.power_w:.0f} W (most {load.max_power_w:.0f}), {load.max_temperature_c:.0f} C"
        )
    if tests is not None:
        print(f"tests: {tests.summary}", *tests.failed[:MAX_PRINTED_TESTS], sep="\n  ")
    for name, failure in failed.items():
        print(f"{name} gave no figure: {failure}")


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


def _is_dry(device: str) -> bool:
    return torch.device(device).type == "cpu"


def _gpu_name(device: str) -> str | None:
    return None if _is_dry(device) else torch.cuda.get_device_name(torch.device(device))


def _gpu_id(device: str) -> str:
    if _is_dry(device):
        return "none"
    return f"GPU-{torch.cuda.get_device_properties(torch.device(device)).uuid}"


def _chip(device: str) -> dict[str, Any]:
    if _is_dry(device):
        return {}
    chip = torch.cuda.get_device_properties(torch.device(device))
    return {
        "capability": f"{chip.major}.{chip.minor}",
        "num_multiprocessors": chip.multi_processor_count,
        "l2_bytes": chip.L2_cache_size,
        "memory_bytes": chip.total_memory,
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
