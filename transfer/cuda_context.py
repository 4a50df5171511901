"""The CUDA context of a thread, which UCX needs where it polls a GPU, and the end of its work."""

import ctypes
import logging
import threading
from collections.abc import Callable
from functools import cache

import torch

from tandem.runtime.errors import TransferError

logger = logging.getLogger(__name__)


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


def begin_settling(device_id: int) -> Callable[[], bool]:
    """Begin to wait for all work of this process on a GPU; the result is True once it is done.

    It stays False when the device fails: then nothing is known of its copies.
    """
    idle = threading.Event()

    def wait() -> None:
        try:
            torch.cuda.synchronize(device_id)
        except Exception as exc:
            logger.error("GPU %d: transfers cannot be settled: %s", device_id, exc)
        else:
            idle.set()

    # synchronize() covers the streams of the transport, which have no handle here
    threading.Thread(target=wait, name="transfer-settling", daemon=True).start()
    return idle.is_set


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
