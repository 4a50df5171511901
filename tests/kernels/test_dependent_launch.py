"""Kernels that begin while the one before them ends: where there is such a launch, and if asked."""

import subprocess
import sys

import pytest
import torch

from tandem.kernels import dependent_launch
from tandem.kernels.layers.norm import rms_norm

BUILDS = """
import torch
from tandem.bench.kernels.compile import compiling, meta
from tandem.engine.decoder.kernel_set import load_kernels

def built(arch):
    x, weight = meta(9, 64, dtype=torch.bfloat16), meta(64, dtype=torch.bfloat16)
    with compiling(arch) as found:
        kernels.rms_norm(x, weight, 1e-6, x)
    return found[0]

kernels = load_kernels("triton", dependent_launch=True)
for arch in (90, 100):
    ptx = built(arch).ptx
    # the norm's weights come before the wait, its rows after it
    before, waits, after = ptx.partition("griddepcontrol.wait")
    assert waits and "griddepcontrol.launch_dependents" in after
    assert "ld.global" in before and "ld.global" in after and "st.global" not in before
    assert built(arch).is_dependent
assert "griddepcontrol" not in built(80).ptx and not built(80).is_dependent
kernels = load_kernels("triton")
assert not built(90).is_dependent
"""


@pytest.mark.slow
def test_builds_wait_for_the_previous_kernel_from_sm_90_on(
    compile_environment: dict[str, str],
) -> None:
    subprocess.run([sys.executable, "-c", BUILDS], check=True, env=compile_environment, timeout=60)


def test_where_kernels_are_interpreted_a_launch_is_as_ever(device: str) -> None:
    dependent_launch.use_dependent_launch(True)
    try:
        x = torch.full((3, 8), 2.0, device=device)
        if device == "cpu":
            assert dependent_launch.launch_options() == {}
        rms_norm(x, torch.ones(8, device=device), 1e-6, x)
        torch.testing.assert_close(x, torch.ones_like(x))
    finally:
        dependent_launch.use_dependent_launch(False)
