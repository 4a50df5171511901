"""Run a server, and end all that it started on request or when the owner is gone.

`python guard.py GRACE_S COMMAND ...` with a pipe as standard input: when the other
end of the pipe closes, which the kernel does for a process that was killed too, the server gets
SIGTERM, and GRACE_S later SIGKILL goes to every process below this one. A file to run, not to
import. Orphans of the server become children of this process, so none can slip away.
"""

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36
DEATHWATCH = Path(__file__).parents[2] / "runtime" / "local" / "deathwatch.py"


def main() -> None:
    grace_s, command = float(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    server = subprocess.Popen(
        [sys.executable, "-I", "-S", str(DEATHWATCH), str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        if _ends_before_its_owner(server):
            sys.exit(server.wait() if server.wait() >= 0 else 128 - server.wait())
        _signal_all(signal.SIGCONT)  # a stopped process takes no other signal but SIGKILL
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(grace_s)
    finally:
        _kill_all()


def _ends_before_its_owner(server: "subprocess.Popen[bytes]") -> bool:
    """Wait for the server's end (True) or for the end of standard input."""
    server_fd = os.pidfd_open(server.pid)
    with selectors.DefaultSelector() as events:
        events.register(server_fd, selectors.EVENT_READ)
        events.register(sys.stdin, selectors.EVENT_READ)
        return any(key.fd == server_fd for key, _ in events.select())


def _signal_all(number: signal.Signals) -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _kill_all() -> None:
    while processes := psutil.Process().children(recursive=True):
        _signal_all(signal.SIGKILL)
        psutil.wait_procs(processes, timeout=5)


if __name__ == "__main__":
    main()
