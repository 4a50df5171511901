"""The socket by which other commands of the same user reach a running `tandem serve`.

A client sends one line, the name of a command. It gets a line of JSON for each thing done, the last
one with `is_over`; a lost client ends nothing.
"""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from tandem.runtime.errors import ServiceError, TandemError
from tandem.runtime.local.local_servers import folder_of_sockets
from tandem.runtime.tasks import cancel
from tandem.runtime.wire.bounds import MAX_TEXT, Message, Text
from tandem.runtime.wire.decoding import json_decoder

logger = logging.getLogger(__name__)

ROLLOUT = b"rollout\n"
_NAME = "control"

Say = Callable[[str], None]


class Said(Message, frozen=True, tag=False):
    """One line to a client."""

    text: Text
    is_over: bool = False
    is_error: bool = False


_decode_said = json_decoder(Said)


class Control:
    """Serves the socket; `roll_out` is the only command, and one runs at a time."""

    def __init__(self, roll_out: Callable[[Say], Awaitable[None]]) -> None:
        self.path = Path()  # once started
        self._roll_out = roll_out
        self._server: asyncio.Server | None = None
        self._work: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen in a new private folder."""
        self.path = folder_of_sockets("serve", len(_NAME)) / _NAME
        self._server = await asyncio.start_unix_server(self._answer, self.path)

    async def close(self) -> None:
        """Stop listening, and the command under way. Idempotent."""
        await cancel(self._work)
        if self._server is not None:
            self._server.close()
            self._server = None
            shutil.rmtree(self.path.parent, ignore_errors=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def write(said: Said) -> None:
            writer.write(msgspec.json.encode(said) + b"\n")

        try:
            if await reader.readline() != ROLLOUT:
                write(Said("the command is not known", is_over=True, is_error=True))
            elif self._work is not None and not self._work.done():
                write(Said("a rollout is under way", is_over=True, is_error=True))
            else:
                self._work = asyncio.create_task(self._run(write))
                await asyncio.wait([self._work])
            await writer.drain()
        except OSError:
            logger.debug("a client of the control socket left")
        finally:
            writer.close()

    async def _run(self, write: Callable[[Said], None]) -> None:
        try:
            await self._roll_out(lambda text: write(Said(text)))
        except TandemError as error:
            write(Said(error.message[:MAX_TEXT], is_over=True, is_error=True))
        else:
            write(Said("every process is replaced", is_over=True))


async def follow_rollout(path: Path, say: Say) -> None:
    """Have the `tandem serve` of a socket replace its processes. Raise ServiceError if it can't."""
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError as error:
        raise ServiceError(f"no `tandem serve` answers at {path}: {error.strerror}") from error
    with contextlib.closing(writer):
        writer.write(ROLLOUT)
        while line := await reader.readline():
            said = _decode_said(line)
            if said.is_error:
                raise ServiceError(said.text)
            say(said.text)
            if said.is_over:
                return
    raise ServiceError("`tandem serve` ended during the rollout")
