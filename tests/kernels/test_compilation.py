"""Every kernel that serving can pick, built for a chip that need not be here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import triton

from tandem.bench.kernels.builds import DOCUMENT, KernelBuild, build_all, render

ROOT = Path(__file__).resolve().parents[2]
ARCH = 90  # of the three that the command builds for: each takes a core for a minute
pytestmark = pytest.mark.timeout(300)  # the first test waits for all builds
PINNED = re.search(r"^triton==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """That of a process that compiles kernels rather than interpreting them."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}


@pytest.fixture(scope="module")
def builds(environment: dict[str, str]) -> list[KernelBuild]:
    if PINNED is None or triton.__version__ != PINNED[1]:
        pytest.skip("another compiler than constraints.txt names makes other builds")
    return build_all([ARCH], environment)


@pytest.fixture(scope="module")
def bad_builds(environment: dict[str, str]) -> dict[str, KernelBuild]:
    command = [sys.executable, str(Path(__file__).with_name("bad_kernels.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=100)
    found = msgspec.json.decode(done.stdout, type=list[KernelBuild])
    return {built.shape: built for built in found}


@pytest.mark.slow
def test_no_build_breaks_a_rule(builds: list[KernelBuild]) -> None:
    broken = [
        f"sm_{built.arch} {built.kernel} {built.shape} ({built.config}): {rule}"
        for built in builds
        for rule in built.broken_rules()
    ]
    assert not broken, "\n".join(broken)


FLOAT8_EXPERTS = """
from tandem.bench.kernels.build_cases import build_cases
from tandem.bench.kernels.builds import build

[case] = [case for case in build_cases(100) if case.shape.endswith("width=768 float8")]
broken = [rule for built in build(100, case) for rule in built.broken_rules()]
assert not broken, broken
"""


@pytest.mark.slow
def test_no_build_of_float8_experts_spills_on_the_next_chip(environment: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-c", FLOAT8_EXPERTS], env=environment, check=True, timeout=100)


@pytest.mark.slow
def test_every_kernel_is_built(builds: list[KernelBuild]) -> None:
    expected = {
        name
        for path in (ROOT / "kernels").rglob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert {built.kernel for built in builds} == expected


@pytest.mark.slow
def test_every_kernel_of_a_decode_step_may_begin_early(builds: list[KernelBuild]) -> None:
    others = {"_block_checksums_kernel", "prefill_kernel", "prefill_hopper_kernel"}
    late = {built.kernel for built in builds if not built.is_dependent}
    assert late == others


@pytest.mark.slow
def test_only_norms_read_before_the_previous_kernel_has_ended(builds: list[KernelBuild]) -> None:
    """They read weights, which no kernel writes."""
    early = {built.kernel for built in builds if built.is_dependent and built.reads_early}
    assert early == {"_rms_norm_kernel"}


@pytest.mark.slow
def test_the_page_has_the_table_of_these_builds(builds: list[KernelBuild]) -> None:
    assert render(builds) in DOCUMENT.read_text(encoding="utf-8"), (
        "run python -m tandem.bench.kernels.builds --output docs/lab/kernel-builds.md"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("spilling", r"spills \d+ bytes a thread"),
        ("narrow", "widest load 2 bytes"),
        ("partly narrow", "loads of 2 bytes"),
        ("few rows", "no wgmma"),
        ("in series", "1 wgmmas waited for 1 times"),
        ("hasty", "does not wait for the previous kernel"),
        ("large", r"\d+ bytes of shared memory, limit 232448"),
    ],
)
def test_a_kernel_that_breaks_a_rule_is_told_so(
    bad_builds: dict[str, KernelBuild], shape: str, expected: str
) -> None:
    rules = bad_builds[shape].broken_rules()
    assert any(re.fullmatch(expected, rule) for rule in rules), rules


@pytest.mark.slow
def test_a_build_for_another_chip_is_told_so(bad_builds: dict[str, KernelBuild]) -> None:
    good = msgspec.structs.replace(bad_builds["narrow"], load_bytes=(16,), target="sm_90a")
    assert good.broken_rules() == []
    other = msgspec.structs.replace(good, target="sm_80")
    assert other.broken_rules() == ["built for sm_80"]
