"""The kind of memory at an address, by the CUDA driver if there is one."""

import ctypes
from collections.abc import Iterable
from functools import cache
from typing import Protocol, cast

from tandem.runtime.errors import InvalidRequestError
from tandem.transfer.transport import Memory

_MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_DEVICE = 2  # CU_MEMORYTYPE_DEVICE


class Driver(Protocol):
    """The one function of libcuda in use."""

    def cuPointerGetAttribute(self, result: object, attribute: int, address: object) -> int:
        """Return a CUresult: zero is success."""


@cache
def cuda_driver() -> Driver | None:
    """Return the driver, None on a machine without one."""
    try:
        return cast(Driver, ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return None


def as_memory(name: str | None) -> Memory:
    """Return the kind of memory. Raise InvalidRequestError for an unknown one."""
    if name == "DRAM":
        return "DRAM"
    if name == "VRAM":
        return "VRAM"
    raise InvalidRequestError(f"mem_type: {name!r} is not 'DRAM' or 'VRAM'", param="mem_type")


def check_memory(memory: Memory, addresses: Iterable[int]) -> None:
    """Raise InvalidRequestError when an address of this process is memory of the other kind.

    The library does not check: a wrong kind would crash the process.
    """
    driver = cuda_driver()
    for address in addresses:
        actual = "VRAM" if driver is not None and _is_device(driver, address) else "DRAM"
        if actual != memory:
            place = "a host" if actual == "DRAM" else "a GPU"
            why = "; there is no CUDA driver here" if driver is None else ""
            raise InvalidRequestError(
                f"mem_type: {memory!r} was given, but {address:#x} is {place}'s memory,"
                f" {actual!r}{why}",
                param="mem_type",
            )


def _is_device(driver: Driver, address: int) -> bool:
    """Return True for device memory. CUDA reports an error for an unknown address: host memory."""
    kind = ctypes.c_uint(0)
    failed = driver.cuPointerGetAttribute(
        ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(address)
    )
    return not failed and kind.value == _DEVICE
