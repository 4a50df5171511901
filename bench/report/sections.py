"""Benchmarks in sections: each in a process of its own with a time limit, figures as JSON lines.

What a section found before it failed, hung or was killed is kept, and the others go on.
"""

import importlib
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import torch

from tandem.bench.kernels.figures import Figure, Measurement, Rate, failures, table
from tandem.bench.kernels.process import UnderLoad, run_bounded, watching_gpu
from tandem.bench.kernels.timing import Setting
from tandem.bench.report.figures import machine, this_commit, utc_now


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the run that has its own process, so that its failure is its own.

    `module` has run(setting: Setting) -> Iterator[Measurement].
    """

    name: str
    module: str
    timeout_s: float
    is_optional: bool = False  # of what is on trial: what fails in it fails no run


@dataclass(slots=True)
class Findings:
    """What the sections gave, in their order."""

    measurements: list[Measurement]
    failures: dict[str, str]
    seconds: dict[str, float]
    under_load: dict[str, UnderLoad]
    has_failed: bool = False


def measure_sections(
    program: str,
    sections: Sequence[Section],
    device: str,
    deadline: float,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Findings:
    """Each section in a process of its own, until `deadline` of time.perf_counter().

    `program` is the module whose `--section NAME` measures one section in its process;
    `arguments` and `environment` are added to those of every section.
    """
    findings = Findings([], {}, {}, {})
    for section in sections:
        started_at = time.perf_counter()
        load: list[UnderLoad] = []
        with watching_gpu(gpu_id(device), load):
            found, failure = in_own_process(
                program, section, device, deadline - started_at, arguments, environment
            )
        findings.measurements += found
        findings.seconds[section.name] = time.perf_counter() - started_at
        if load:
            findings.under_load[section.name] = load[0]
        if failure:
            findings.failures[section.name] = failure
        if not section.is_optional:
            findings.has_failed |= bool(failure) or any(each.failure for each in found)
        say(f"{section.name}: {findings.seconds[section.name]:.1f} s, {len(found)} figures")
    return findings


def in_own_process(
    program: str,
    section: Section,
    device: str,
    seconds_left: float,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> tuple[list[Measurement], str]:
    """What the section found before its end, and why it ended if that was early."""
    timeout_s = min(section.timeout_s, seconds_left)
    if timeout_s <= 0:
        return [], "no time was left"
    command = [sys.executable, "-m", program, "--device", device, "--section", section.name]
    command += arguments
    # Read when triton is imported.
    interprets = {"TRITON_INTERPRET": "1" if is_cpu(device) else "0"}
    ended = run_bounded(command, timeout_s, {**interprets, **(environment or {})})
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


def main_of_section(sections: Sequence[Section], name: str, setting: Setting) -> int:
    """Measures one section in this process, a line of JSON for each measurement."""
    out = os.dup(1)
    os.dup2(2, 1)  # a library that prints must not print among the figures
    (section,) = (each for each in sections if each.name == name)
    with os.fdopen(out, "wb") as stream:
        for measurement in importlib.import_module(section.module).run(setting):
            stream.write(msgspec.json.encode(measurement) + b"\n")
            stream.flush()
    return 0


def best_rates(measurements: Sequence[Measurement]) -> dict[Rate, float]:
    """The ceilings: the best that was measured of each rate by the section for that."""
    rates: dict[Rate, float] = {}
    for each in measurements:
        if each.rate and each.seconds and each.name.startswith(f"{each.rate}_"):
            rate = each.work / statistics.median(each.seconds)
            rates[each.rate] = max(rate, rates.get(each.rate, 0.0))
    return rates


def print_figures(figures: Sequence[Figure], findings: Findings) -> None:
    """The table, and what the GPU did meanwhile."""
    print(table(figures))
    if any(figure.status == "dry" for figure in figures):
        print("a dry run: all sizes are tiny and no figure means anything")
    for name, load in findings.under_load.items():
        print(
            f"under load, {name}: SM {load.sm_mhz:.0f} MHz (least {load.min_sm_mhz:.0f}), "
            f"{load.power_w:.0f} W (most {load.max_power_w:.0f}), {load.max_temperature_c:.0f} C"
        )


def print_failures(figures: Sequence[Figure], findings: Findings) -> None:
    for name, failure in all_failures(figures, findings).items():
        print(f"{name} gave no figure: {failure}")


def all_failures(figures: Sequence[Figure], findings: Findings) -> dict[str, str]:
    """Of sections and of figures, by their names."""
    return {**findings.failures, **failures(figures)}


def document(
    *,
    command: Sequence[str],
    commit: str,
    device: str,
    started_at: datetime,
    how: Mapping[str, str],
    findings: Findings,
    figures: Sequence[Figure],
) -> dict[str, Any]:
    """A run as JSON: the figures, their ceilings, and the command, commit and machine."""
    return {
        "started_at": started_at.isoformat(timespec="seconds"),
        "ended_at": utc_now().isoformat(timespec="seconds"),
        "command": list(command),
        "commit": commit or this_commit(),
        "is_dry": is_cpu(device),
        "machine": machine(),
        "chip": chip(device),
        "gpu_under_load": findings.under_load,
        "how": dict(how),
        "section_seconds": findings.seconds,
        "ceilings_per_s": best_rates(findings.measurements),
        "figures": {figure.name: figure for figure in figures},
        "failures": all_failures(figures, findings),
    }


def write_document(whole: Mapping[str, Any], path: Path) -> None:
    """As JSON, in a folder that is made at need."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")


def is_cpu(device: str) -> bool:
    return torch.device(device).type == "cpu"


def gpu_name(device: str) -> str | None:
    return None if is_cpu(device) else torch.cuda.get_device_name(torch.device(device))


def gpu_id(device: str) -> str:
    """What nvidia-smi calls it; "none" for a CPU."""
    if is_cpu(device):
        return "none"
    return f"GPU-{torch.cuda.get_device_properties(torch.device(device)).uuid}"


def chip(device: str) -> dict[str, Any]:
    """The GPU's own numbers; empty for a CPU."""
    if is_cpu(device):
        return {}
    properties = torch.cuda.get_device_properties(torch.device(device))
    return {
        "capability": f"{properties.major}.{properties.minor}",
        "num_multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
