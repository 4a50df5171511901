"""Prefill workers as a decode worker sees them: excluded for corrupt KV, dead, or stopped."""

import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from tandem.runtime.membership.node import pid_space
from tandem.runtime.wire.cluster_messages import Instance

WINDOW_S = 60.0  # failures further apart than this do not add up


@dataclass(slots=True)
class _Record:
    failed_at: deque[float] = field(default_factory=deque)
    excluded_until: float = 0.0


class PeerHealth:
    """Counts failed verifications per process; a restarted worker begins with none.

    `exclude_after` failures within a minute exclude a process for `exclude_for_s`. Times are
    `time.perf_counter()` readings.
    """

    def __init__(self, exclude_after: int, exclude_for_s: float) -> None:
        self._exclude_after = exclude_after
        self._exclude_for_s = exclude_for_s
        self._records: dict[tuple[str, str], _Record] = {}  # (instance, epoch)

    def failed(self, claimant: tuple[str, str], now: float) -> bool:
        """Count a failed verification of (instance, epoch); True if it excludes the process."""
        self._forget_old(now)
        record = self._records.setdefault(claimant, _Record())
        record.failed_at.append(now)
        if len(record.failed_at) < self._exclude_after or now < record.excluded_until:
            return False
        record.excluded_until = now + self._exclude_for_s
        record.failed_at.clear()
        return True

    def is_excluded(self, claimant: tuple[str, str], now: float) -> bool:
        record = self._records.get(claimant)
        return record is not None and now < record.excluded_until

    def excluded(self, now: float) -> list[str]:
        """Return the instances that get no work at the moment. From any thread."""
        records = list(self._records.items())
        return [instance for (instance, _), record in records if now < record.excluded_until]

    def _forget_old(self, now: float) -> None:
        for claimant, record in list(self._records.items()):
            while record.failed_at and now - record.failed_at[0] > WINDOW_S:
                record.failed_at.popleft()
            if not record.failed_at and now >= record.excluded_until:
                del self._records[claimant]


def is_dead(instance: Instance) -> bool:
    """Return True if no thread of the instance's processes runs; False if that is unknown."""
    return is_here(instance) and all(map(_has_ended, _pids(instance)))


def is_stopped(instance: Instance) -> bool:
    """Return True if a signal or a debugger has stopped a process, which may run again."""
    return is_here(instance) and any(map(_stands_still, _pids(instance)))


def is_here(instance: Instance) -> bool:
    """Return True if the process has a pid here: only its own kernel knows its state."""
    return bool(instance.pid and instance.pid_space and instance.pid_space == pid_space())


def _pids(instance: Instance) -> list[int]:
    """Return the processes that write the instance's KV: its own, and those of its other ranks."""
    return [instance.pid, *instance.rank_pids]


def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _is_zombie(Path("/proc", str(pid)))


def _stands_still(pid: int) -> bool:
    try:
        return _state(Path("/proc", str(pid))) in ("T", "t")
    except (FileNotFoundError, ProcessLookupError):
        return False


def _is_zombie(process: Path) -> bool:
    """Return True if the process is dead and not reaped: its first thread, and no other, is left.

    Other threads may outlive the first one.
    """
    try:
        return _state(process) in ("Z", "X") and len(os.listdir(process / "task")) == 1
    except FileNotFoundError:
        return True


def _state(process: Path) -> str:
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
