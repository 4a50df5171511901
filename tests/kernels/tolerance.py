"""The dtypes and builds that are tried, and the distance of their results from float64's."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.kernels.tuned import INTERPRETED, architecture

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the tests' tensors are on a GPU")


def launchers(name: str, triton: Any, torch: Any, c: Any = None) -> pytest.MarkDecorator:
    """Try each kind of kernels as the argument `name`."""
    kinds = [pytest.param(triton, id="triton"), pytest.param(torch, id="torch")]
    if c is not None:
        kinds.append(pytest.param(c, id="c", marks=on_cpu))
    return pytest.mark.parametrize(name, kinds)


# Under the interpreter bf16 dots are computed wrongly: bfloat16 is for machines with a GPU.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
# for tests that take seconds in the interpreter
COSTLY_DTYPES = [torch.float16] + [pytest.param(d, marks=pytest.mark.slow) for d in DTYPES[::2]]

# Unit roundoff: half the distance from 1 to the next larger number.
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def unlike(configs: Iterable[Any]) -> list[Any]:
    """Return the configurations without those that are alike here.

    The interpreter knows neither warps nor stages.
    """
    found = list(configs)
    if architecture() == INTERPRETED:
        schedule = {name: 1 for name in ("num_warps", "num_stages") if hasattr(found[0], name)}
        found = list({replace(config, **schedule): config for config in found}.values())
    return found


def tolerance(dtype: torch.dtype, num_roundings: float, magnitude: float = 1.0) -> float:
    """The largest absolute error of a result of size `magnitude` rounded `num_roundings` times.

    Sums are taken in float32 whatever the dtype: they add a few of float32's units at most.
    """
    return magnitude * (num_roundings * UNIT[dtype] + 64 * UNIT[torch.float32])
