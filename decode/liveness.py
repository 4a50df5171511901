"""Whether another process is dead for certain, or stands still; only its own kernel can tell."""

import os
from pathlib import Path

from tandem.runtime.messages import Instance
from tandem.runtime.node import pid_space


def is_dead(instance: Instance) -> bool:
    """True when no thread of the instance's process runs any more; False when that is not known."""
    if not _is_visible(instance):
        return False
    try:
        os.kill(instance.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _is_zombie(Path("/proc", str(instance.pid)))


def is_stopped(instance: Instance) -> bool:
    """True when the instance's process was stopped, by a signal or a debugger, and may go on."""
    if not _is_visible(instance):
        return False
    try:
        return _state(Path("/proc", str(instance.pid))) in ("T", "t")
    except FileNotFoundError:
        return False


def _is_visible(instance: Instance) -> bool:
    return bool(instance.pid and instance.pid_space and instance.pid_space == pid_space())


def _is_zombie(process: Path) -> bool:
    """Dead and not yet reaped. Other threads may outlive the first: the last one must be it."""
    try:
        return _state(process) in ("Z", "X") and len(os.listdir(process / "task")) == 1
    except FileNotFoundError:
        return True


def _state(process: Path) -> str:
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
