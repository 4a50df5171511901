"""The kernels on one GPU: tested, then measured against the chip's ceilings and their targets.

On a machine without this package installed, from the repository's root:

make typing-links && PYTHONPATH=build/typing:$PYTHONPATH python3 -m tandem.bench.kernels
"""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem.bench.report.figures import Figure, at_least, at_most
from tandem.bench.report.options import parse
from tandem.bench.report.sections import Section, SectionOptions, SectionProgram, run_sections
from tandem.bench.report.setting import Setting

MODULE = "tandem.bench.kernels"
TESTS = Path(__file__).resolve().parents[2] / "tests" / "kernels"
HOPPER_TESTS = TESTS / "attention" / "test_prefill_hopper.py"
TESTS_OF_A_GPU = (  # the others test the simulator, kernels in C, and builds for other chips
    "attention/test_prefill.py",
    "attention/test_decode.py",
    "attention/test_prefixes.py",
    "layers",
    "linear/test_float8.py",
    "linear/test_fused.py",
    "sampling",
    "test_cascade_attention.py",
    "test_checksum.py",
    "test_dependent_launch.py",
    "test_fused_layers.py",
    "test_runner_with_kernels.py",
)
NUM_TEST_PROCESSES = 14  # they compile for most of the time
MAX_FAILED = 40
TESTS_A_FIGURE = 50
HOW = {
    "time": "median of rounds; in a round all that compare take turns; a sample is one replay of a "
    "CUDA graph of many calls, divided by their number; inputs are random and go in turns, so that "
    "no cache holds them",
    "ceiling": "the best rate in the same run, of the library's and our own plain kernel, or "
    "the floor of a time: the bytes that must move over that rate",
    "share": "value over ceiling, or floor over time",
    "error": "of the norm, against float64 or a float32 reference, on the measured shape, before "
    "and after; a result that is over the bound gets no figure",
    "TFLOP/s": "4 * heads * head_dim operations for every position that a query sees",
    "product": "of few tokens; its floor is reading its matrix once",
    "prompts": "beside experts, cuBLAS has two dense products over as many rows; an error of 2: "
    "tokens have other bits without the others",
    "sampling": "its floor is reading the logits once",
}


def run_tests(setting: Setting) -> Iterator[Figure]:
    """Run the kernels' tests on this device; on a CPU those of one family."""
    options = [str(TESTS / path) for path in TESTS_OF_A_GPU]
    if setting.is_dry:
        options = [str(TESTS / "layers" / "test_embedding.py")]
    elif importlib.util.find_spec("xdist") is not None:
        options += ["-n", str(NUM_TEST_PROCESSES), "--dist", "worksteal"]
    yield from _tests("tests", options)


def run_hopper_tests(setting: Setting) -> Iterator[Figure]:
    """Run the tests of the kernel that is written for one chip."""
    if not setting.is_dry:
        yield from _tests("tests_hopper", [str(HOPPER_TESTS)])


def against_torch(figures: Sequence[Figure]) -> Iterator[Figure]:
    """Compare whole prompts with the fastest of torch's backends at their length."""
    for ours in figures:
        whole = re.fullmatch(r"prefill_(?:hopper_)?dense_(\w+)_block(?:64|128)", ours.name)
        if whole is None or not ours.samples:
            continue
        backend = re.compile(rf"sdpa_[a-z]+_{whole[1]}")
        theirs = [each for each in figures if backend.fullmatch(each.name) and each.samples]
        if theirs:
            best = max(theirs, key=lambda figure: figure.value or 0.0)
            pairs = zip(ours.samples, best.samples, strict=True)
            samples = tuple(mine / other for mine, other in pairs)
            label = f"{ours.label} / {best.label}"
            yield Figure(f"{ours.name}_vs_sdpa", label, "x", samples, at_least(1.0))


PROGRAM = SectionProgram(
    module=MODULE,
    results="kernels.json",
    sections=(
        Section("tests", f"{MODULE}.__main__:run_tests", 130.0, {"OMP_NUM_THREADS": "1"}),
        Section("ceilings", f"{MODULE}.ceilings:run", 45.0),
        Section("prefill", f"{MODULE}.prefill:run", 75.0),
        Section("decode", f"{MODULE}.decode:run", 60.0),
        Section("layers", f"{MODULE}.layers:run", 45.0),
        Section("fused", f"{MODULE}.products:run", 60.0),
        Section("float8", f"{MODULE}.products:run_float8", 45.0, is_optional=True),
        Section("prompts", f"{MODULE}.prompts:run", 90.0, only_named=True),
        Section("blocks", f"{MODULE}.layers:run_checksum", 45.0),
        Section("sampling", f"{MODULE}.sampling:run", 45.0),
        Section("prefill_hopper", f"{MODULE}.prefill:run_hopper", 40.0),
        Section("tests_hopper", f"{MODULE}.__main__:run_hopper_tests", 45.0),
    ),
    how=HOW,
    budget_s=345.0,  # so that a run ends within six minutes
    derive=lambda figures: against_torch(figures),
)


def _tests(name: str, options: Sequence[str]) -> Iterator[Figure]:
    """Run pytest; yield the outcomes so far now and then, so that a run that is cut has them."""
    # Versions here may be other ones than those the project is developed with, and warn otherwise.
    usual = [
        "-v",
        "--tb=line",
        f"--maxfail={MAX_FAILED}",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
    ]
    config = [f"--rootdir={TESTS.parents[1]}", "-c", str(TESTS.parents[1] / "pyproject.toml")]
    command = [sys.executable, "-m", "pytest", *usual, *config, *options]
    num_passed, failed, code = 0, dict[str, None](), None

    def figure() -> Figure:
        label = f"kernels' tests that fail ({num_passed} passed)"
        ended = "pytest was cut" if code is None else f"pytest ended with {code}"
        failure = "" if code == 0 else f"{ended}: {' '.join(failed)}"
        return Figure(name, label, "", (float(len(failed)),), at_most(0.0), failure=failure)

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stderr.write(line)
            num_passed += bool(re.search(r"\bPASSED\b", line))
            if wrong := re.search(r"(?:FAILED|ERROR) (\S+::\S+)|(\S+::\S+) (?:FAILED|ERROR)", line):
                failed[wrong[1] or wrong[2]] = None
            if wrong or num_passed % TESTS_A_FIGURE == 1:
                yield figure()
        code = process.wait()
    yield figure()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the kernels; 1 when a test failed or a figure is missing."""
    return run_sections(PROGRAM, parse(SectionOptions, MODULE, arguments))


if __name__ == "__main__":
    sys.exit(main())
