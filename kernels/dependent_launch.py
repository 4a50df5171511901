"""Programmatic dependent launch: a kernel begins while the one before it in the stream ends.

CUDA calls it so. From sm_90 on, a kernel that is launched with `launch_options()` may begin as soon
as every program of the one before has called `wait_for_predecessor` or ended. It may read
weights at once, and whatever kernels wrote, and write, after its own call. As each kernel that is
launched so waits for the one before, all earlier ones have ended too.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from tandem.kernels.tuned import architecture

LEAST_ARCHITECTURE = 90

_is_used = False


def use_dependent_launch(is_used: bool) -> None:
    """Turn dependent launches of this process's kernels on or off; older chips have none."""
    global _is_used
    _is_used = is_used


def launch_options() -> dict[str, bool]:
    """Return a launch's options, for a kernel whose programs all wait for the previous kernel."""
    if _is_used and architecture() >= LEAST_ARCHITECTURE:
        return {"launch_pdl": True}
    return {}


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _has_dependent_launch() -> bool:
    return not triton.knobs.runtime.interpret and cuda_capability_geq(9)


@triton.jit
def wait_for_predecessor():  # type: ignore[no-untyped-def]
    """Wait until all that earlier kernels wrote is there; let the next kernel begin."""
    if _has_dependent_launch():
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
