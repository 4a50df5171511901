"""Runs a command that the kernel kills when the process that started it dies.

`python deathwatch.py PARENT_PID COMMAND ...` requests SIGKILL on the parent's death and becomes the
command. A file to run, not to import: a `preexec_fn` would do the same, but would run Python in a
forked copy of a process that may have threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:  # the parent died before the request was in place
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
