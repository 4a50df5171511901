"""The handoff on one GPU: two processes, WRITE over CUDA IPC, held against the GPU's own ceilings.

On a machine without this package installed, from the repository's root:

make typing-links && PYTHONPATH=build/typing python3 -m tandem.bench.handoff.gpu
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import torch
import uvloop

from tandem.bench.handoff.gpu_sections import (
    MODEL_SHAPE,
    TINY_SHAPE,
    Setting,
    measure_ceilings,
    measure_checksums,
    measure_streaming,
    measure_transfers,
)
from tandem.bench.report.figures import Figure, document, table, utc_now
from tandem.runtime.errors import TandemError

RESULTS = Path(__file__).parents[1] / "results"
SECTION_TIMEOUT_S = 150.0
HOW = {
    "pool": "engine: cudaMalloc by CuPy, as workers allocate it; torch: its caching allocator with "
    "expandable_segments off; expandable: the same with it on",
    "write": "both ends on one GPU; a write is over when its sender knows that it has arrived; "
    "TB/s of payload, of which a copy reads and writes each byte",
    "exposed": "from the end of a step's kernels until the last group of its layers has arrived, "
    "checksums of the sender included",
    "ceilings": "copy_, amax and matmul of torch in the same run",
}


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the run that has its own process, so that its failure is its own."""

    name: str
    environment: Mapping[str, str]


SECTIONS = (
    Section("ceilings", {}),
    Section("engine", {}),
    Section("torch", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}),
    Section("expandable", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    Section("checksums", {}),
    Section("streaming", {}),
)


def setting_for(device: str, section: str) -> Setting:
    """A full measurement on a GPU; on a CPU as little as shows that everything runs."""
    is_dry = device == "cpu"
    allocator = "torch" if section in ("torch", "expandable") else "engine"
    return Setting(
        shape=msgspec.structs.replace(
            TINY_SHAPE if is_dry else MODEL_SHAPE, device=device, allocator=allocator
        ),
        rounds=1 if is_dry else 5,
        num_writes=2 if is_dry else 10,
        num_pings=20 if is_dry else 500,
        matrix_size=64 if is_dry else 4096,
        is_dry=is_dry,
    )


async def run_section(name: str, setting: Setting) -> list[Figure]:
    match name:
        case "ceilings":
            return measure_ceilings(setting)
        case "checksums":
            return await measure_checksums(setting)
        case "streaming":
            return await measure_streaming(setting)
        case _:
            return await measure_transfers(setting, name)


def in_own_process(section: Section, device: str) -> tuple[list[Figure], str]:
    """The section's figures, or why there are none."""
    command = [sys.executable, "-m", "tandem.bench.handoff.gpu", "--device", device]
    try:
        ended = subprocess.run(
            [*command, "--section", section.name],
            env={**os.environ, **section.environment},
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            timeout=SECTION_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [], f"took more than {SECTION_TIMEOUT_S:g} s"
    if ended.returncode:
        return [], ended.stdout.decode(errors="replace").strip() or f"exit {ended.returncode}"
    return [
        _figure(each) for each in msgspec.json.decode(ended.stdout, type=list[dict[str, Any]])
    ], ""


def shares_of_the_copy(figures: Sequence[Figure]) -> Iterator[Figure]:
    """Each transfer of whole prompts against the copy ceiling of the run."""
    copies = [figure.value for figure in figures if figure.name == "copy_tb_s"]
    for figure in figures:
        if copies and figure.name.endswith("_whole_agents_tb_s"):
            name = figure.name.replace("_tb_s", "_of_copy")
            shares = tuple(value / copies[0] for value in figure.rounds)
            yield Figure(name, f"{figure.label} / copy ceiling", "", shares)


def _figure(values: Mapping[str, Any]) -> Figure:
    known = {field.name for field in fields(Figure) if field.init}
    plain: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in values.items()
        if key in known
    }
    return Figure(**plain)


def default_output(device: str) -> Path:
    """`bench/results/GPU/handoff.json`, the GPU's name in lower case and dashes."""
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name(torch.device(device))
    return RESULTS / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") / "handoff.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures everything, prints the table, writes the JSON; 1 when a section gave nothing."""
    parser = argparse.ArgumentParser(prog="python -m tandem.bench.handoff.gpu")
    parser.add_argument("--device", default="cuda:0", help="cpu: a dry run, tiny and meaningless")
    parser.add_argument("--output", type=Path, help="default: bench/results/GPU/handoff.json")
    parser.add_argument("--commit", default="", help="of the code, where there is no git")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.section:
        return _main_of_section(options.section, options.device)
    started_at, figures, failures = utc_now(), [], {}
    for section in SECTIONS:
        print(f"{section.name} ...", file=sys.stderr, flush=True)
        found, failure = in_own_process(section, options.device)
        figures += found
        if failure:
            failures[section.name] = failure
    figures += shares_of_the_copy(figures)
    print(table(figures))
    for name, failure in failures.items():
        print(f"{name} gave nothing: {failure}")
    output = options.output or default_output(options.device)
    output.parent.mkdir(parents=True, exist_ok=True)
    whole = document(
        command=["python", "-m", "tandem.bench.handoff.gpu", *(arguments or sys.argv[1:])],
        settings=msgspec.to_builtins(setting_for(options.device, "engine")),
        started_at=started_at,
        figures=figures,
        how=HOW,
        commit=options.commit,
    )
    whole["failures"] = failures
    output.write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n")
    print(output)
    return 1 if failures else 0


def _main_of_section(name: str, device: str) -> int:
    out = os.dup(1)
    os.dup2(2, 1)  # the library prints to standard output at times
    try:
        figures = uvloop.run(run_section(name, setting_for(device, name)))
    except (TandemError, RuntimeError) as error:
        os.write(out, str(error).encode())
        return 1
    with os.fdopen(out, "wb") as stream:
        stream.write(msgspec.json.encode([figure.to_json() for figure in figures]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
