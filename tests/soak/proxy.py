"""A TCP proxy that can play a network partition: nothing passes, and nobody is told."""

import asyncio
import contextlib
from pathlib import Path
from typing import Self

HOST = "127.0.0.1"
READ_BYTES = 1 << 16


class Proxy:
    """Listens on a port of its own and passes bytes to `target`, a port of loopback or a socket.

    While it is cut, bytes wait as in a network that loses packets, and who connects gets silence.
    """

    def __init__(self, target: int | Path) -> None:
        self.port = 0
        self._target = target
        self._num_cuts = 0
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def cut(self) -> None:
        """From now on nothing passes, until as many `heal` as `cut` have come."""
        self._num_cuts += 1
        self._is_open.clear()

    def heal(self, *, reset: bool = False) -> None:
        """What waits goes on, or is lost with its connection if `reset`."""
        self._num_cuts -= 1
        if reset:
            for connection in self._connections:
                connection.cancel()
        if self._num_cuts == 0:
            self._is_open.set()

    async def start(self) -> Self:
        """Listens; `address` is known after that."""
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def close(self) -> None:
        """Ends all connections, and refuses new ones."""
        assert self._server is not None
        self._server.close()
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._target, Path):
            return await asyncio.open_unix_connection(self._target)
        return await asyncio.open_connection(HOST, self._target)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            await self._is_open.wait()
            there = await self._dial()
            writers.append(there[1])
            pumps = [
                asyncio.ensure_future(self._pump(reader, there[1])),
                asyncio.ensure_future(self._pump(there[0], writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            pass  # nobody listens there: the caller sees its connection close
        finally:
            for each in writers:
                each.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                await self._is_open.wait()
                writer.write(data)
                await writer.drain()
            await self._is_open.wait()  # its end is told as late as its bytes
