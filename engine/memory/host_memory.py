"""The memory of the host that steps allocate and free."""

import ctypes

# mallopt's parameters in glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8


def keep_freed_memory() -> None:
    """Make this process's malloc reuse large freed blocks rather than return them.

    Every step allocates and frees the same megabytes. Mapping them anew costs a page fault per
    4 KiB: a sampling step of 64 rows of 4,096 took 2.5 ms that way and 0.5 ms without. One arena,
    because the arenas of other threads return memory above 64 MiB despite the thresholds: 512
    prompt tokens took 0.5 s on the engine thread that way and 0.37 s without.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**30)
        mallopt(M_ARENA_MAX, 1)
