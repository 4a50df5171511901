"""A process between a client and a server."""

import asyncio


class Eavesdropper:
    """Passes connections on to a server, and keeps the bytes of both directions."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.from_client, self.from_server = bytearray(), bytearray()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        server_reader, server_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(
            self._pass_on(reader, server_writer, self.from_client),
            self._pass_on(server_reader, writer, self.from_server),
        )

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray
    ) -> None:
        while data := await reader.read(65536):
            kept += data
            writer.write(data)
        writer.close()
