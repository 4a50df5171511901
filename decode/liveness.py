"""Whether another process is dead for certain; only its own kernel can tell."""

import os
from pathlib import Path

from tandem.runtime.messages import Instance
from tandem.runtime.node import pid_space


def is_dead(instance: Instance) -> bool:
    """True when no thread of the instance's process runs any more; False when that is not known."""
    if not instance.pid or not instance.pid_space or instance.pid_space != pid_space():
        return False
    try:
        os.kill(instance.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _is_zombie(Path("/proc", str(instance.pid)))


def _is_zombie(process: Path) -> bool:
    """Dead and not yet reaped. Other threads may outlive the first: the last one must be it."""
    try:
        state = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return state in ("Z", "X") and len(os.listdir(process / "task")) == 1
    except FileNotFoundError:
        return True
