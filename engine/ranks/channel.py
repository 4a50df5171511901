"""The socket between rank 0 and another rank: frames of bytes, each after its length."""

import socket
import struct
from typing import Protocol

import msgspec

from tandem.runtime.process.logs import LogFormat

_LENGTH = struct.Struct("<Q")


class Read(Protocol):
    """A file's `read`, which returns fewer bytes at the end alone."""

    def read(self, size: int, /) -> bytes:
        """Return the next bytes."""


class StartMessage(msgspec.Struct, frozen=True):
    """The first frame to a rank; `config` is an EngineConfig as JSON."""

    config: str
    rank: int
    num_segments: int
    leader_pid: int
    exchange_file: int | None  # file descriptors that the rank's process has too
    pool_file: int | None
    folder: str  # in which ranks with a device each meet; empty: those files are theirs
    order_channel: int | None  # the far end of the orders about the rank's own pool
    log_level: str
    log_format: LogFormat


class ReadyMessage(msgspec.Struct, frozen=True):
    """The only frame of a rank: it has its weights, or it ends with this error.

    An empty frame answers it once all ranks are ready: they load for as long as they may.
    """

    error: str = ""


def send(channel: socket.socket, data: bytes) -> None:
    """Send one frame; blocks. Raises OSError when the other end is closed."""
    channel.sendall(_LENGTH.pack(len(data)) + data)


def receive(file: Read) -> bytes | None:
    """Return the next frame; None when the other end is closed. Blocks."""
    try:
        head = file.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        [length] = _LENGTH.unpack(head)
        data = file.read(length)
    except ConnectionError:  # closed before it had read all
        return None
    return data if len(data) == length else None
