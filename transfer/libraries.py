"""The libraries that bring a UCX of their own, NIXL and ucxx: a process loads one of them.

A UCX patches libc's memory calls, to drop its registrations of memory that goes. The patches of a
second UCX replace those of the first, which from then on keeps stale registrations, opens contexts
without a registration cache, and can end in a segmentation fault (see `ucx/port.py`).
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from tandem.runtime.errors import TransferError

Library = Literal["NIXL", "ucxx"]

_PACKAGES: dict[Library, tuple[str, ...]] = {
    "NIXL": ("nixl_cu13", "nixl_cu12", "nixl"),
    "ucxx": ("ucxx",),
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
        yield
