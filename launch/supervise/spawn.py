"""Starting a process beside an event loop, by vfork.

uvloop starts one by fork, and what libraries hook into fork and munmap then runs in the child: UCX
takes a spin lock there, and if another thread of the parent held it the child never gets further.
Between vfork and the program nothing runs.
"""

import asyncio
import os
import subprocess
from collections.abc import Mapping
from typing import IO

DEVNULL = subprocess.DEVNULL
PIPE = subprocess.PIPE

LINE_LIMIT = 2**16


class Process:
    """A child of this process; its pipes are streams of the running event loop."""

    def __init__(self, popen: "subprocess.Popen[bytes]") -> None:
        self.pid = popen.pid
        self.stdin: asyncio.StreamWriter | None = None
        self.stdout: asyncio.StreamReader | None = None
        self.stderr: asyncio.StreamReader | None = None
        self._popen = popen
        self._ended = asyncio.Event()
        self._end_fd = os.pidfd_open(popen.pid)
        asyncio.get_running_loop().add_reader(self._end_fd, self._on_end)

    @property
    def returncode(self) -> int | None:
        """None while it runs; minus the signal's number when a signal ended it."""
        return self._popen.poll()

    async def wait(self) -> int:
        await self._ended.wait()
        return self._popen.wait()

    async def communicate(self) -> tuple[bytes, bytes]:
        """All that it still writes to its pipes, once it has ended."""
        out, err = await asyncio.gather(_rest(self.stdout), _rest(self.stderr))
        await self.wait()
        return out, err

    def send_signal(self, number: int) -> None:
        """Nothing happens when it has ended."""
        self._popen.send_signal(number)

    def kill(self) -> None:
        self._popen.kill()

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._end_fd)
        os.close(self._end_fd)
        self._popen.wait()
        if self.stdin is not None:
            self.stdin.close()
        self._ended.set()

    async def connect_pipes(self, limit: int) -> None:
        """Make streams of the pipes that it was started with; lines have at most `limit` bytes."""
        loop = asyncio.get_running_loop()
        if self._popen.stdin is not None:
            writer, protocol = await loop.connect_write_pipe(
                lambda: asyncio.streams.FlowControlMixin(loop), self._popen.stdin
            )
            self.stdin = asyncio.StreamWriter(writer, protocol, None, loop)
        if self._popen.stdout is not None:
            self.stdout = await _reader(self._popen.stdout, limit)
        if self._popen.stderr is not None:
            self.stderr = await _reader(self._popen.stderr, limit)


async def spawn(
    *command: str,
    stdin: int | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
    start_new_session: bool = False,
    limit: int = LINE_LIMIT,
) -> Process:
    """Start `command`; each of the three is inherited, PIPE, DEVNULL or a file.

    Raises OSError when the program cannot be started.
    """
    process = Process(
        subprocess.Popen(  # noqa: ASYNC220  there is no other way to vfork, and it is short
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            start_new_session=start_new_session,
        )
    )
    await process.connect_pipes(limit)
    return process


async def _reader(pipe: IO[bytes], limit: int) -> asyncio.StreamReader:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=limit, loop=loop)
    await loop.connect_read_pipe(lambda: _PipeProtocol(reader, loop=loop), pipe)
    return reader


class _PipeProtocol(asyncio.StreamReaderProtocol):
    def eof_received(self) -> bool:
        super().eof_received()
        return False  # a pipe has no other direction to be kept open for


async def _rest(reader: asyncio.StreamReader | None) -> bytes:
    return b"" if reader is None else await reader.read()
