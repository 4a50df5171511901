"""The engine on one GPU: steps, prompts, overlap, chunks, loading and the whole stack, measured.

Weights are random, of Qwen3-8B's shape. On a machine without this package installed, from the
repository's root:

make typing-links && PYTHONPATH=build/typing:$PYTHONPATH python3 -m tandem.bench.engine
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tandem.bench.engine.profile import profile_text
from tandem.bench.engine.setting import FOLDER_VARIABLE
from tandem.bench.kernels.figures import Figure, results_path, to_figure
from tandem.bench.kernels.process import gpu_state
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

PROGRAM = "tandem.bench.engine"
SCHEMA_VERSION = 1
BUDGET_S = 460.0  # of a whole run, so that it ends within eight minutes
SECTIONS = (
    Section("ceilings", "tandem.bench.kernels.ceilings", 45.0),
    Section("scheduling", "tandem.bench.engine.scheduling", 40.0),
    Section("decode", "tandem.bench.engine.decode", 100.0),
    Section("prefill", "tandem.bench.engine.prefill", 60.0),
    Section("chunked", "tandem.bench.engine.chunked", 60.0),
    Section("switches", "tandem.bench.engine.switches", 70.0),
    Section("load", "tandem.bench.engine.load", 90.0),
    Section("served", "tandem.bench.engine.served", 165.0),
)
HOW = {
    "limit": "the least the figure could be (of a rate the most). Decode: the bytes of all "
    "matrices, the head and the contexts' K/V, over the read ceiling of this run. Prefill: 2 "
    "operations per weight and token and 4 * heads * head_dim per position seen, over the matmul "
    "ceiling",
    "ratio": "limit over value, or value over limit of a rate: 100% is the limit reached",
    "target": "of the value on an H200; on another GPU of the ratio, as far above its own floor",
    "decode step": "time on the device of one step of B sequences, by events, from its inputs' "
    "copy to its tokens, through scheduler, runner, CUDA graph and sampling, with overlap; the K/V "
    "is random and nothing of the prefix cache is used; median of a round's steps, median of "
    "rounds; p99: of the single steps of all rounds",
    "GPU idle between decode steps": "by a profiler's timeline, whose own cost is in it: from the "
    "end of one step's graph to the start of the next one's, without what copies do there, as a "
    "share of all time. Time in no step's events: the same question without a profiler, the share "
    "of the time from tokens to tokens that lies in no step",
    "prefill": "device time of a prompt, its steps summed; until its token: by the host's clock",
    "worst decode step": "the longest step that holds decodes between a long prompt's arrival and "
    "its first token, by the device's clock; the target is engine.max_step_ms. The gap between "
    "tokens is by the host's clock. The limit of the prompt in chunks is the prompt alone",
    "graphs, overlap": "the same steps with each of both on and off, in turns. From tokens to "
    "tokens: one step, by the host's clock; its limit is the device's own time. Host's part: of "
    "that, all but waiting for the device",
    "scheduler's host time": "CPU time of scheduling, launching and postprocessing one step, with "
    "a runner that computes nothing",
    "weights": "files in safetensors to fused tensors on the device; its limit is the best read of "
    "the same files by threads, their pages dropped before where the file system lets go of them",
    "TTFT, ITL": "what a client of the HTTP server sees: due to first token, and every gap between "
    "two pieces of an answer; one frontend, one decode and one prefill worker on this one device, "
    "K/V handed over by NIXL; prompts of 1500 tokens on average, answers of 64; medians of the "
    "rounds, in which loads and policies take turns",
    "where the time goes": "kernels by their share of the device's busy time, and calls per step",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and writes the JSON; 1 when a section or a figure failed."""
    options = _parser().parse_args(arguments)
    device = options.device
    if options.section:
        setting = setting_for(device)
        if options.once:
            setting = replace(setting, rounds=1, num_warmups=0)
        return main_of_section(SECTIONS, options.section, setting)
    started_at, begin = utc_now(), time.perf_counter()
    before = gpu_state(gpu_id(device))
    sections = [each for each in SECTIONS if not options.only or each.name in options.only]
    with tempfile.TemporaryDirectory(prefix="tandem-engine-") as folder:
        findings = measure_sections(
            PROGRAM,
            sections,
            device,
            begin + BUDGET_S,
            ["--once"] if options.once else [],
            {FOLDER_VARIABLE: folder},
        )
    ceilings = best_rates(findings.measurements)
    is_dry = is_cpu(device)
    figures = [to_figure(each, ceilings, is_dry=is_dry) for each in findings.measurements]
    _print_all(figures, findings)
    whole = {
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
    }
    output = options.output or results_path(gpu_name(device), "engine.json")
    write_document(whole, output)
    print(output)
    say(f"{time.perf_counter() - begin:.0f} s in all")
    return 1 if findings.has_failed else 0


def _print_all(figures: Sequence[Figure], findings: Findings) -> None:
    print_figures(figures, findings)
    for figure in figures:
        measured = figure.measurement
        if measured is not None and measured.profile is not None:
            print(f"\nwhere the time goes, {profile_text(figure.label, measured.profile)}")
    if notes := list(_notes(figures)):
        print("\nnotes:", *notes, sep="\n  ")
    print("\nwhat the figures mean:")
    for name, text in HOW.items():
        print(f"  {name}: {text}")
    print()
    print_failures(figures, findings)


def _notes(figures: Sequence[Figure]) -> Iterator[str]:
    for figure in figures:
        measured = figure.measurement
        if measured is not None and (text := measured.unavailable or measured.note):
            yield f"{figure.label}: {text}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}")
    parser.add_argument("--device", default="cuda:0", help="cpu: a dry run, tiny and meaningless")
    parser.add_argument("--output", type=Path, help="default: bench/results/GPU/engine.json")
    parser.add_argument("--commit", default="", help="of the code, where there is no git")
    names = [section.name for section in SECTIONS]
    parser.add_argument("--only", nargs="+", choices=names, help="these sections only")
    parser.add_argument("--section", choices=names, help="in this process, as JSON lines")
    parser.add_argument("--once", action="store_true", help="one round of each, for a quick look")
    return parser


if __name__ == "__main__":
    sys.exit(main())
