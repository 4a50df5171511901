"""Everything that only a GPU can show, in one run: does it work, and is it right?

python -m tandem.bench.gpu_first_run --output FILE

Sections are independent: one that fails, hangs or is cut costs no other, and the document is
written anew after each. Their limits fit the budget, in the order of what must be known first;
others run by --only. `--device cpu` runs them small. Where this package is not installed,
`correctness.sh` and then `second_call.sh` of this folder run it from the repository's root.
"""

import sys
from collections.abc import Sequence

from tandem.bench.report.options import parse
from tandem.bench.report.sections import Section, SectionOptions, SectionProgram, run_sections

MODULE = "tandem.bench.gpu_first_run"
# No emulation: a transfer over another path than CUDA IPC is an error and not 0.5 GB/s.
_STRICT = {"UCX_PROTO_EMULATION_ENABLE": "n", "UCX_PROTO_INFO": "y"}
FLOAT8 = "tandem.bench.kernels.products:run_float8"
LIFETIME = f"{MODULE}.transfers:ipc_lifetime"
NIXL = "tandem.bench.handoff.gpu_sections:transfers"
_CACHE, _GET = "UCX_CUDA_IPC_CACHE", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
PROGRAM = SectionProgram(
    module=MODULE,
    results="first_run.json",
    sections=(
        Section("env", f"{MODULE}.machine:run", 20.0),
        Section("prebuild", f"{MODULE}.machine:prebuilt", 35.0),
        Section("served_tiny", f"{MODULE}.served:run", 100.0),
        Section("nixl", NIXL, 45.0, _STRICT),
        Section("visibility", f"{MODULE}.transfers:visibility", 25.0),
        Section("smoke", f"{MODULE}.smoke:run", 60.0),
        Section("graphs", f"{MODULE}.engine:graphs", 55.0),
        Section("late_write", f"{MODULE}.transfers:late_write", 25.0),
        Section("ipc_lifetime", LIFETIME, 25.0),
        Section("ceilings", "tandem.bench.kernels.ceilings:run", 45.0, only_named=True),
        Section("sanitize", f"{MODULE}.smoke:run_sanitized", 200.0, only_named=True),
        Section("float8", FLOAT8, 60.0, is_optional=True, only_named=True),
        Section("graphs_all", f"{MODULE}.engine:all_graphs", 110.0, only_named=True),
        Section("nixl_cached", NIXL, 60.0, {**_STRICT, _CACHE: "y"}, only_named=True),
        Section("nixl_get_auto", NIXL, 60.0, {_GET: "auto"}, only_named=True),
        Section("ipc_lifetime_cached", LIFETIME, 40.0, {_CACHE: "y"}, only_named=True),
        Section("parity", f"{MODULE}.engine:parity", 75.0, only_named=True),
    ),
    how={
        "smoke": "the largest relative error over all shapes of a kernel, against its reference "
        "implementation in float32 on the same device; outputs and dead slots hold NaN before",
        "graphs": "answers of the bundled model that differ from those of eager steps; by cuBLAS "
        "near ties may part, as padding can change its kernel; by Tandem's products none may",
        "prebuild": "kernels of the bundled model, built in threads as a worker does at its start",
        "served_tiny": "by Tandem's products, whose sums do not depend on a prompt's company",
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
    budget_s=400.0,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections; 1 when one failed."""
    return run_sections(PROGRAM, parse(SectionOptions, MODULE, arguments))


if __name__ == "__main__":
    sys.exit(main())
