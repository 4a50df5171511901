"""How far a kernel's result may lie from the same computed in float64, and why."""

import pytest
import torch

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the tests' tensors are on a GPU")

# Under the interpreter bf16 dots are computed wrongly: bfloat16 is for machines with a GPU.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
# for tests that take seconds in the interpreter
COSTLY_DTYPES = [torch.float16] + [pytest.param(d, marks=pytest.mark.slow) for d in DTYPES[::2]]

# Unit roundoff: half the distance from 1 to the next larger number.
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def tolerance(dtype: torch.dtype, num_roundings: float, magnitude: float = 1.0) -> float:
    """The largest absolute error of a result of size `magnitude` rounded `num_roundings` times.

    Sums are taken in float32 whatever the dtype: they add a few of float32's units at most.
    """
    return magnitude * (num_roundings * UNIT[dtype] + 64 * UNIT[torch.float32])
