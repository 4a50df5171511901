"""A peer of the request plane that speaks the wire format by hand."""

import asyncio

from tandem.runtime.plane.framing import (
    HEADER,
    VERSION,
    Batch,
    Failure,
    Frame,
    FrameReader,
    Hello,
    Preamble,
    Status,
    encode_frame,
    encode_preamble,
)

# Nonce and proof, of a client or of a server without a token.
GREETING = 2 * encode_preamble(Preamble(VERSION, Status.OK, bytes(32)))


class RawPeer:
    """Speaks the wire format by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._frames = FrameReader()
        self._num_written = 0

    @classmethod
    async def dial(cls, address: str, preamble: bytes | None = None) -> "RawPeer":
        host, _, port = address.rpartition(":")
        peer = cls(*await asyncio.open_connection(host, int(port)))
        peer.writer.write(preamble or GREETING)
        return peer

    @classmethod
    async def join(cls, address: str) -> "RawPeer":
        """Dial, and send the first frame."""
        peer = await cls.dial(address)
        peer.send(Hello("raw"))
        await peer.reader.readexactly(len(GREETING))
        return peer

    def send(self, frame: Frame) -> None:
        """Write one frame with the next number."""
        self.writer.write(encode_frame(self._num_written, frame))
        self._num_written += 1

    def send_part_of_a_frame(self, num_bytes: int) -> None:
        """Write a header and all but the last of `num_bytes` bytes."""
        self.writer.write(HEADER.pack(num_bytes, self._num_written) + bytes(num_bytes - 1))

    async def read_failure(self) -> Failure:
        """Read until a stream fails."""
        while True:
            for frame in self._frames.feed(await self._read()):
                if isinstance(frame, Batch) and frame.fails:
                    return frame.fails[0]

    async def read_batches(self, num_items: int) -> list[Batch]:
        batches: list[Batch] = []
        while sum(len(batch.items) for batch in batches) < num_items:
            frames: list[Frame] = self._frames.feed(await self._read())
            batches += [frame for frame in frames if isinstance(frame, Batch)]
        return batches

    async def _read(self) -> bytes:
        data = await self.reader.read(65536)
        assert data, "the server closed the connection"
        return data

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()
