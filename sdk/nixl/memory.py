"""Whose memory an address is: asked of the CUDA driver, where there is one."""

import ctypes
from collections.abc import Iterable
from functools import cache
from typing import Protocol, cast

from tandem.runtime.errors import InvalidRequestError
from tandem.transfer.transport import Memory

_MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_DEVICE = 2  # CU_MEMORYTYPE_DEVICE


class Driver(Protocol):
    """The one function of libcuda that is called here."""

    def cuPointerGetAttribute(self, result: object, attribute: int, address: object) -> int:
        """A CUresult: zero is success."""


@cache
def cuda_driver() -> Driver | None:
    """None on a machine without one."""
    try:
        return cast(Driver, ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return None


def as_memory(name: str | None) -> Memory:
    """InvalidRequestError when `name` is no kind of memory that is transferred here."""
    if name == "DRAM":
        return "DRAM"
    if name == "VRAM":
        return "VRAM"
    raise InvalidRequestError(f"mem_type: {name!r} is not 'DRAM' or 'VRAM'", param="mem_type")


def check_memory(memory: Memory, addresses: Iterable[int]) -> None:
    """InvalidRequestError when an address of this process is memory of the other kind.

    The library believes what it is told, and a wrong kind ends in a crash of the process.
    """
    driver = cuda_driver()
    for address in addresses:
        actual = "VRAM" if driver is not None and _is_device(driver, address) else "DRAM"
        if actual != memory:
            place = "a host" if actual == "DRAM" else "a GPU"
            why = "; there is no CUDA driver here" if driver is None else ""
            raise InvalidRequestError(
                f"mem_type: {memory!r} was said, but {address:#x} is {place}'s memory,"
                f" {actual!r}{why}",
                param="mem_type",
            )


def _is_device(driver: Driver, address: int) -> bool:
    """An address that CUDA has never heard of is an error to it, and the host's to us."""
    kind = ctypes.c_uint(0)
    failed = driver.cuPointerGetAttribute(
        ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(address)
    )
    return not failed and kind.value == _DEVICE
