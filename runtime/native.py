"""Errors of native libraries. A panic of Rust is a BaseException: no `except Exception` ends it."""

from tandem.runtime.printable import one_line

_MAX_REASON_BYTES = 300
_PANICS = "pyo3_runtime"  # the module of each library's own PanicException


def is_fault(error: BaseException) -> bool:
    """Return True for an error or a panic of a library; False for an exit, an interrupt."""
    return isinstance(error, Exception) or type(error).__module__ == _PANICS


def fault_of(error: BaseException) -> str:
    """Return the reason of a library's error or panic, on one line. Raises any other exception."""
    if not is_fault(error):
        raise error
    return one_line(str(error) or type(error).__name__, _MAX_REASON_BYTES)
