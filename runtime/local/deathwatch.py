"""Runs a command that the kernel kills when the process that started it dies.

`python deathwatch.py PARENT_PID COMMAND ...` requests SIGKILL on the parent's death and becomes the
command: a `preexec_fn` would do the same, but would run Python in a forked copy of a process that
may have threads. A file to run, with nothing but the standard library.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    end_with(parent_pid)
    os.execv(command[0], command)


def end_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies. Exit if it is dead by now."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the request was in place
        sys.exit(1)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process. Raise OSError where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl: {os.strerror(code)}")


if __name__ == "__main__":
    main()
