"""The CUDA context of a thread, which UCX needs where it polls memory of a GPU."""

import ctypes
from functools import cache

import torch

from tandem.runtime.errors import TransferError


def ensure_cuda_context(device_id: int) -> None:
    """Make the GPU's context current on the calling thread, if the thread has none.

    UCX asks the current context for its events, and crashes on a thread that has none.
    """
    if has_cuda_context():
        return
    torch.cuda.set_device(device_id)
    if not has_cuda_context():
        raise TransferError(
            f"GPU {device_id}: this thread has no CUDA context; torch 2.9 gives one"
        )


def has_cuda_context() -> bool:
    """Return True when a CUDA context is current on the calling thread."""
    context = ctypes.c_void_p()
    _driver().cuCtxGetCurrent(ctypes.byref(context))
    return context.value is not None


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
