"""The libraries that bring a UCX of their own, NIXL and ucxx: a process loads one of them.

A UCX patches libc's memory calls, to drop its registrations of memory that goes. The patches of a
second UCX replace those of the first, which from then on keeps stale registrations, opens contexts
without a registration cache, and can end in a segmentation fault (see `ucx/port.py`).
"""

import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

from tandem.runtime.errors import TransferError

T = TypeVar("T")
Library = Literal["NIXL", "ucxx"]

logger = logging.getLogger(__name__)

_PACKAGES: dict[Library, tuple[str, ...]] = {
    "NIXL": ("nixl_cu13", "nixl_cu12", "nixl"),
    "ucxx": ("ucxx",),
}
# UCX reads these when it is loaded; a value that is set already stays. Machines without a GPU do
# without them: UCX would warn of variables that it has no use for.
_UCX_DEFAULTS = {
    # The cache keeps a peer's pool mapped until this process ends: the memory of a peer that died
    # stays taken, and the one that replaces it finds the GPU full.
    "UCX_CUDA_IPC_CACHE": "n",
    # Where UCX sees no NVLink it turns READs into messages over TCP, at a hundredth of the rate.
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
}
_one_at_a_time = threading.Lock()


@contextmanager
def loading(library: Library) -> Iterator[None]:
    """Import `library` in the body. TransferError where this process has loaded the other one."""
    with _one_at_a_time:
        for other, packages in _PACKAGES.items():
            if other != library and any(sys.modules.get(package) for package in packages):
                raise TransferError(
                    f"{library} cannot be loaded: this process has loaded {other}, and each brings "
                    "a UCX of its own; use them in separate processes"
                )
        if has_cuda_driver():
            for variable, value in _UCX_DEFAULTS.items():
                os.environ.setdefault(variable, value)
        yield


def has_cuda_driver() -> bool:
    """Return True on a machine with a driver for NVIDIA's GPUs."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def translated(doing: str, call: Callable[[], T]) -> T:
    """Return the result of `call`; its exception becomes a TransferError."""
    try:
        return call()
    except Exception as exc:
        raise TransferError(f"{doing}: {exc or type(exc).__name__}") from exc


def quietly(call: Callable[[], object]) -> None:
    """Call a library's cleanup, and only log its failure."""
    try:
        call()
    except Exception as exc:
        logger.debug("cleaning up: %s", exc)
