"""A process that has imported what roles need, and forks one for each order: it starts at once.

`python -m tandem.runtime.local.forked OWNER_PID SOCKET_FD MODULE ...` is started by `ForkServer`.
It has one thread and opens nothing, so that a fork is like a new process: a module that loads UCX
or asks for a GPU must not be named.
"""

import gc
import importlib
import os
import runpy
import socket
import sys

import msgspec

from tandem.runtime.local.deathwatch import end_with

MAX_MESSAGE_BYTES = 2**17  # what a socket of packets takes under Linux's defaults


class Order(msgspec.Struct, frozen=True):
    """Become `python -m MODULE ARGUMENTS`; the log's descriptor comes with it."""

    module: str
    arguments: list[str]
    environment: dict[str, str]


def main() -> None:
    owner_pid, connection = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    gc.disable()
    for module in sys.argv[3:]:
        importlib.import_module(module)
    gc.freeze()  # their objects are never looked at: their pages stay shared
    gc.enable()
    order = _serve(connection, owner_pid)
    if order is not None:
        sys.argv = [order.module, *order.arguments]
        runpy.run_module(order.module, run_name="__main__", alter_sys=True)


def _serve(connection: socket.socket, owner_pid: int) -> Order | None:
    """Return in each child with its order, and here when nobody is left to give one."""
    while True:
        data, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1)
        if not data:
            return None
        gate, opener = os.pipe()
        parent_pid = os.fork()
        if not parent_pid:
            if os.fork():
                os._exit(0)  # the owner, which takes orphans, becomes the parent
            order = msgspec.msgpack.decode(data, type=Order)
            os.close(opener)
            os.read(gate, 1)  # until then
            os.close(gate)
            _begin(owner_pid, order, fds[0])
            connection.send(msgspec.msgpack.encode(os.getpid()))
            connection.close()
            return order
        os.waitpid(parent_pid, 0)
        for fd in (gate, opener, *fds):
            os.close(fd)


def _begin(owner_pid: int, order: Order, log_fd: int) -> None:
    """Become what a process is that was started by its command, with its name in lists."""
    import setproctitle  # by children alone

    end_with(owner_pid)
    os.setsid()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)
    # before its environment changes, in whose place the name is written
    setproctitle.setproctitle(" ".join(["python", "-m", order.module, *order.arguments]))
    os.environ.clear()
    os.environ.update(order.environment)


if __name__ == "__main__":
    main()
