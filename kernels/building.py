"""Kernels that are built before their first launch, beside one another."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import triton
from triton.runtime.jit import JITFunction


@contextlib.contextmanager
def running_kernels_by(replacement: Any) -> Iterator[None]:
    """Call `replacement(run, *args, ...)` in place of Triton's `run` of a kernel."""
    run = JITFunction.run

    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(partial(run, self), *args, **kwargs)

    JITFunction.run = replaced
    try:
        yield
    finally:
        JITFunction.run = run


@contextlib.contextmanager
def building(num_threads: int) -> Iterator[None]:
    """Build what the body launches, and launch nothing; all is built at its end.

    Launch with tensors of torch's meta device: shapes, strides and dtypes, no memory. The compiler
    gives up the GIL for nearly all of its time.
    """

    def build(run: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(*args, grid=grid, warmup=True, **kwargs)

    with (
        running_kernels_by(build),
        ThreadPoolExecutor(num_threads, "building") as pool,
        triton.AsyncCompileMode(pool),
    ):
        yield
