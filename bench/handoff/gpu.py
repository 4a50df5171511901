"""The handoff on one GPU: two processes, WRITE over CUDA IPC, held against the GPU's own ceilings.

On a machine without this package installed, from the repository's root:

make typing-links && PYTHONPATH=build/typing python3 -m tandem.bench.handoff.gpu
"""

import sys
from collections.abc import Sequence

from tandem.bench.report.options import parse
from tandem.bench.report.sections import Section, SectionOptions, SectionProgram, run_sections

MODULE = "tandem.bench.handoff.gpu"
SECTIONS = "tandem.bench.handoff.gpu_sections"
TIMEOUT_S = 60.0  # of a section
PROGRAM = SectionProgram(
    module=MODULE,
    results="handoff.json",
    sections=(
        Section("ceilings", "tandem.bench.kernels.ceilings:run", TIMEOUT_S),
        Section("transfers", f"{SECTIONS}:transfers", TIMEOUT_S),
        Section("checksums", f"{SECTIONS}:checksums", TIMEOUT_S),
        Section("streaming", f"{SECTIONS}:streaming", TIMEOUT_S),
    ),
    how={
        "write": "both ends on one GPU; a write is over when its sender knows that it has arrived; "
        "GB/s of payload, whose ceiling is half a copy's rate, which reads and writes each byte",
        "exposed": "from the end of a step's kernels until the last group of its layers has "
        "arrived, checksums of the sender included",
    },
    budget_s=240.0,
    once_rounds=1,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the handoff on one GPU; 1 when a section gave nothing."""
    return run_sections(PROGRAM, parse(SectionOptions, MODULE, arguments))


if __name__ == "__main__":
    sys.exit(main())
