"""Temporary folders that outlive no process: what a killed one left, the next one removes."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class TemporaryFolder:
    """A new private folder in `place`, by default that of temporary files.

    It is locked until `remove`, or until the process ends in whatever way. First those of the same
    purpose that no process has locked are removed, but for the `keep` newest.
    """

    def __init__(self, purpose: str, place: Path | None = None, keep: int = 0) -> None:
        prefix = f"tandem-{purpose}-"
        place = place or Path(tempfile.gettempdir())
        _remove_ended(place, prefix, keep)
        # Under its own name it would be free for a moment, and a process that starts then would
        # remove it.
        new = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=place))
        self._lock = _lock(new)
        self.path = new.rename(place / new.name.removeprefix("."))

    def remove(self) -> None:
        """Remove the folder with all that is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock(folder: Path) -> int | None:
    """Return the descriptor that holds the lock; None for another user's folder, and a locked one.

    A file system without locks has none to give.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    if os.fstat(descriptor).st_uid == os.geteuid():
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
    os.close(descriptor)
    return None


def _remove_ended(place: Path, prefix: str, keep: int) -> None:
    with contextlib.ExitStack() as stack:
        ended = []
        for folder in place.glob(f"{prefix}*"):
            if (lock := _lock(folder)) is not None:
                stack.callback(os.close, lock)
                ended.append((os.fstat(lock).st_mtime_ns, folder))
        for _, folder in sorted(ended, reverse=True)[keep:]:
            shutil.rmtree(folder, ignore_errors=True)
