"""One process of a machine builds kernels at a time: others find the builds in the cache then."""

import contextlib
import fcntl
import logging
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

PATIENCE_S = 300.0  # for another process that builds; the slowest kernels take seconds each
LOCK = "tandem.lock"
_POLL_S = 0.05


@contextlib.contextmanager
def alone_on_this_machine(folder: Path, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Hold the lock of `folder`, which ends with the process; without it after `patience_s`.

    A folder that cannot be written to needs no lock.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / LOCK).open("w"))
        except OSError as error:
            logger.warning("builds of kernels are not kept in %s: %s", folder, error)
        else:
            _lock(file.fileno(), folder, patience_s)
        yield


def _lock(file: int, folder: Path, patience_s: float) -> None:
    deadline, is_told = time.perf_counter() + patience_s, False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        except OSError as error:  # a file system without locks
            logger.warning("%s cannot be locked: %s", folder, error)
            return
        if time.perf_counter() >= deadline:
            logger.warning("another process still builds kernels in %s; not waiting for it", folder)
            return
        if not is_told:
            logger.info("waiting for another process that builds kernels in %s", folder)
            is_told = True
        time.sleep(_POLL_S)
