"""The engine on one GPU: steps, prompts, overlap and chunks, measured.

Weights are random, of Qwen3-8B's shape. On a machine without this package installed, from the
repository's root:

make typing-links && PYTHONPATH=build/typing:$PYTHONPATH python3 -m tandem.bench.engine
"""

import sys
from collections.abc import Sequence

from tandem.bench.report.options import parse
from tandem.bench.report.sections import Section, SectionOptions, SectionProgram, run_sections

MODULE = "tandem.bench.engine"
HOW = {
    "ceiling": "the least the figure could be (of a rate the most). Decode: the bytes of all "
    "matrices, the head and the contexts' K/V, over the read rate of this run. Prefill: 2 "
    "operations per weight and token and 4 * heads * head_dim per position seen, over the matmul "
    "rate",
    "share": "ceiling over value, or value over ceiling of a rate: 100% is the ceiling reached",
    "target": "of the value on an H200; on another GPU of the share, as far above its own floor",
    "decode step": "time on the device of one step of B sequences, by events, from its inputs' "
    "copy to its tokens, through scheduler, runner, CUDA graph and sampling, with overlap; the K/V "
    "is random and nothing of the prefix cache is used; median of a round's steps, median of "
    "rounds; p99: of the single steps of all rounds",
    "GPU idle between decode steps": "by a profiler's timeline, whose own cost is in it: from the "
    "end of one step's graph to the start of the next one's, without the copies there, as a "
    "share of all time. Time in no step's events: the same without a profiler, the share "
    "of the time from tokens to tokens that lies in no step",
    "prefill": "device time of a prompt, its steps summed; until its token: by the host's clock",
    "rate by float8, by int4": "the same prompt's time by weights that are numbers, over its time "
    "by codes as files in FP8 and of AWQ have",
    "worst decode step": "the longest step that holds decodes between a long prompt's arrival and "
    "its first token, by the device's clock; the target is engine.max_step_ms. The gap between "
    "tokens is by the host's clock. The ceiling of the prompt in chunks is the prompt alone",
    "cublas, fused, early": "steps by cuBLAS's products, by fused ones, and with kernels that "
    "begin while the one before ends, in turns. From tokens to tokens: one step, by the host's "
    "clock; its ceiling is the device's own time. Host's part: of that, all but waiting for the "
    "device",
    "profiles": "kernels by their share of the device's busy time, and calls per step",
}
PROGRAM = SectionProgram(
    module=MODULE,
    results="engine.json",
    sections=(
        Section("ceilings", "tandem.bench.kernels.ceilings:run", 45.0),
        Section("decode", f"{MODULE}.decode:run", 100.0),
        Section("prefill", f"{MODULE}.prefill:run", 60.0),
        Section("chunked", f"{MODULE}.chunked:run", 60.0),
        Section("products", f"{MODULE}.products:run", 120.0, only_named=True),
        Section("quantized", f"{MODULE}.quantized:run", 60.0, only_named=True),
    ),
    how=HOW,
    budget_s=295.0,  # so that a run ends within five minutes
    once_rounds=1,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the engine; 1 when a section or a figure failed."""
    return run_sections(PROGRAM, parse(SectionOptions, MODULE, arguments))


if __name__ == "__main__":
    sys.exit(main())
