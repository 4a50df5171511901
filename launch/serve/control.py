"""The socket by which other commands of the same user reach a running `tandem serve`.

A client sends one line, a command and its argument. It gets a line of JSON for each thing done, the
last one with `is_over`; a lost client ends nothing.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from tandem.runtime.errors import ServiceError, TandemError
from tandem.runtime.local.local_servers import folder_of_sockets
from tandem.runtime.local.temporary_folder import TemporaryFolder
from tandem.runtime.tasks import cancel
from tandem.runtime.wire.bounds import MAX_TEXT, Message, Text
from tandem.runtime.wire.decoding import json_decoder

logger = logging.getLogger(__name__)

_NAME = "control"

Say = Callable[[str], None]
Command = Callable[[Say, str], Awaitable[str]]  # with its argument; returns the last thing to say


class Said(Message, frozen=True, tag=False):
    """One line to a client."""

    text: Text
    is_over: bool = False
    is_error: bool = False


_decode_said = json_decoder(Said)


class Control:
    """Serves the socket; one command runs at a time."""

    def __init__(self, commands: Mapping[str, Command]) -> None:
        self._folder: TemporaryFolder | None = None  # once started
        self._commands = commands
        self._server: asyncio.Server | None = None
        self._work: asyncio.Task[None] | None = None
        self._what = ""  # the command of `_work`

    @property
    def path(self) -> Path:
        """The socket, once started."""
        return (self._folder.path if self._folder else Path()) / _NAME

    async def start(self) -> None:
        """Listen in a new private folder."""
        self._folder = folder_of_sockets("serve", len(_NAME))
        self._server = await asyncio.start_unix_server(self._answer, self.path)

    async def close(self) -> None:
        """Stop listening, and the command under way. Idempotent."""
        await cancel(self._work)
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._folder is not None:
            self._folder.remove()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def write(said: Said) -> None:
            writer.write(msgspec.json.encode(said) + b"\n")

        def write_text(text: str) -> None:
            write(Said(text))

        try:
            line = (await reader.readline()).decode(errors="replace").strip()
            name, _, argument = line.partition(" ")
            if (work := self._commands.get(name)) is None:
                write(Said("the command is not known", is_over=True, is_error=True))
            elif self._work is not None and not self._work.done():
                write(Said(f"`{self._what}` is under way", is_over=True, is_error=True))
            else:
                self._what = line
                self._work = asyncio.create_task(self._run(work(write_text, argument), write))
                await asyncio.wait([self._work])
            await writer.drain()
        except OSError:
            logger.debug("a client of the control socket left")
        finally:
            writer.close()

    async def _run(self, work: Awaitable[str], write: Callable[[Said], None]) -> None:
        try:
            last = await work
        except TandemError as error:
            write(Said(error.message[:MAX_TEXT], is_over=True, is_error=True))
        else:
            write(Said(last, is_over=True))


async def command(path: Path, line: str, say: Say = lambda text: None) -> str:
    """Have the `tandem serve` of a socket do something; return the last thing that it says.

    Raise ServiceError if it can't.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError as error:
        raise ServiceError(f"no `tandem serve` answers at {path}: {error.strerror}") from error
    with contextlib.closing(writer):
        writer.write(line.encode() + b"\n")
        while answer := await reader.readline():
            said = _decode_said(answer)
            if said.is_error:
                raise ServiceError(said.text)
            say(said.text)
            if said.is_over:
                return said.text
    raise ServiceError(f"`tandem serve` ended during `{line}`")
