"""Servers of strangers, to which processes of a cluster are led."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem.runtime.plane.framing import (
    MAGIC,
    PREAMBLE_BYTES,
    VERSION,
    Heartbeat,
    Hello,
    encode_frame,
)

PREAMBLE = MAGIC + VERSION.to_bytes(2, "little") + bytes(PREAMBLE_BYTES - len(MAGIC) - 2)
GREETINGS = ("silence", "garbage", "zeros", "echo")
_BEAT_S = 0.3


@asynccontextmanager
async def trap(greeting: str, caught: list[bytes] | None = None) -> AsyncIterator[str]:
    """Serve at an address: answer a preamble as `greeting` tells, and then only heartbeats.

    The preambles of clients are added to `caught`.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            shown = await reader.readexactly(PREAMBLE_BYTES)
            if caught is not None:
                caught.append(shown)
            answers = {"garbage": b"HTTP/1.1 200 OK\r\n\r\n" * 8, "zeros": PREAMBLE, "echo": shown}
            writer.write(answers.get(greeting, b""))
            if greeting in ("zeros", "echo"):
                writer.write(answers[greeting])  # there may be two of them
                writer.write(encode_frame(0, Hello("stranger")))
            for number in range(1, 1000):
                await asyncio.sleep(_BEAT_S)
                if greeting != "silence":
                    writer.write(encode_frame(number, Heartbeat(number, True)))
                await writer.drain()
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
