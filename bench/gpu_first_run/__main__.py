"""Everything that only a GPU can show, in one run: does it work, and is it right?

python -m tandem.bench.gpu_first_run --budget SECONDS --output FILE

Sections are independent: one that fails, hangs or is cut costs no other, and the document is
written anew after each. `--device cpu` runs all of them small. On a machine without this package
installed, from the repository's root:

make typing-links && PYTHONPATH=build/typing:$PYTHONPATH python3 -m tandem.bench.gpu_first_run
"""

import sys
from collections.abc import Sequence

from tandem.bench.report.options import parse
from tandem.bench.report.sections import Section, SectionOptions, SectionProgram, run_sections

MODULE = "tandem.bench.gpu_first_run"
# No emulation: a transfer over another path than CUDA IPC is an error and not 0.5 GB/s.
_STRICT = {"UCX_PROTO_EMULATION_ENABLE": "n", "UCX_PROTO_INFO": "y"}
NIXL = "tandem.bench.handoff.gpu_sections:transfers"
_CACHE, _GET = "UCX_CUDA_IPC_CACHE", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
PROGRAM = SectionProgram(
    module=MODULE,
    results="first_run.json",
    sections=(
        Section("env", f"{MODULE}.machine:run", 25.0),
        Section("ceilings", "tandem.bench.kernels.ceilings:run", 45.0),
        Section("smoke", f"{MODULE}.smoke:run", 110.0),
        Section("sanitize", f"{MODULE}.smoke:run_sanitized", 70.0, is_optional=True),
        Section("float8", "tandem.bench.kernels.products:run_float8", 60.0, is_optional=True),
        Section("graphs", f"{MODULE}.engine:graphs", 110.0),
        Section("nixl", NIXL, 60.0, _STRICT),
        Section("nixl_cached", NIXL, 60.0, {**_STRICT, _CACHE: "y"}),
        Section("nixl_get_auto", NIXL, 60.0, {_GET: "auto"}),
        Section("visibility", f"{MODULE}.transfers:visibility", 40.0),
        Section("ipc_lifetime", f"{MODULE}.transfers:ipc_lifetime", 40.0),
        Section("ipc_lifetime_cached", f"{MODULE}.transfers:ipc_lifetime", 40.0, {_CACHE: "y"}),
        Section("late_write", f"{MODULE}.transfers:late_write", 30.0),
        Section("served_tiny", f"{MODULE}.served:run", 110.0),
        Section("parity", f"{MODULE}.engine:parity", 75.0),
    ),
    how={
        "smoke": "the largest relative error over all shapes of a kernel, against its reference "
        "implementation in float32 on the same device; outputs and dead slots hold NaN before",
        "graphs": "answers of the bundled model that differ from those of eager steps, by the same "
        "products",
        "float8": "engine.float8_products beside products that expand FP8 weights, and cuBLAS's",
        "nixl": "transfers between two processes, as handoff.gpu measures them; without emulation; "
        "nixl_cached: with CUDA IPC's cache; nixl_get_auto: with READs as UCX chooses",
        "visibility": "writes whose blocks the far end checksums at once, on their notice",
        "ipc_lifetime": "GPU memory that a killed process's pool still takes, in GiB",
        "late_write": "blocks that change after a torn connection's transfers had ended",
        "parity": "greedy answers that differ from those of prompts computed alone: near ties, as "
        "the multiplications' order of sums depends on the number of rows; deterministic: by "
        "Tandem's products, whose order does not",
    },
    budget_s=480.0,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections; 1 when one failed."""
    return run_sections(PROGRAM, parse(SectionOptions, MODULE, arguments))


if __name__ == "__main__":
    sys.exit(main())
