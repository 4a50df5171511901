"""The way from the connector's rank to the engine of its process tree, which computes prompts.

A socket in a private folder: frames of four bytes of length and a message in msgpack.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import msgspec

from tandem.runtime.errors import ServiceError
from tandem.runtime.messages import Message, encode, pack_tokens, unpack_tokens

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 16 * 1024 * 1024
_LENGTH_BYTES = 4


class ComputePrompt(Message, frozen=True):
    """A prompt to compute, for the ticket `key`; its KV stays in the engine's pool."""

    key: str
    token_ids: bytes
    cache_salt: str = ""


class StopPrompt(Message, frozen=True):
    """The KV of the prompt is not wanted any more."""

    key: str


class PromptFailed(Message, frozen=True):
    """The engine does not compute the prompt."""

    key: str
    reason: str


Received = TypeVar("Received")
ToServer = ComputePrompt | StopPrompt
Compute = Callable[[str, list[int], str], Awaitable[None]]  # key, tokens, cache salt


async def _receive(
    reader: asyncio.StreamReader, decoder: "msgspec.msgpack.Decoder[Received]"
) -> Received | None:
    """Return the next message; None at the end of the connection."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
        if length > MAX_FRAME_BYTES:
            raise ServiceError(f"a frame of {length} bytes is longer than {MAX_FRAME_BYTES}")
        return decoder.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    data = encode(message)
    writer.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)


class PromptServer:
    """Computes prompts for the rank. `compute` returns at the prompt's end, or raises."""

    def __init__(self, path: str, compute: Compute) -> None:
        self.path = path
        self._compute = compute
        self._running: dict[str, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None
        self._decoder = msgspec.msgpack.Decoder(ToServer)

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._running.values()):
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (message := await _receive(reader, self._decoder)) is not None:
                if isinstance(message, StopPrompt):
                    if (task := self._running.get(message.key)) is not None:
                        task.cancel()
                    continue
                task = asyncio.create_task(self._run(message, writer))
                self._running[message.key] = task
                task.add_done_callback(partial(self._ended, message.key))
        finally:
            writer.close()

    def _ended(self, key: str, task: "asyncio.Task[None]") -> None:
        if self._running.get(key) is task:
            del self._running[key]

    async def _run(self, ask: ComputePrompt, writer: asyncio.StreamWriter) -> None:
        try:
            await self._compute(ask.key, unpack_tokens(ask.token_ids), ask.cache_salt)
        except Exception as error:  # of the engine's, of any kind
            logger.warning("ticket %s: the prompt was not computed: %r", ask.key, error)
            _send(writer, PromptFailed(ask.key, f"the engine failed: {error!r}"[:500]))


class PromptClient:
    """The rank's end. `on_failed` gets key and reason of a prompt that is not computed."""

    def __init__(self) -> None:
        self.on_failed: Callable[[str, str], None] = lambda key, reason: None
        self._writer: asyncio.StreamWriter | None = None
        self._decoder = msgspec.msgpack.Decoder(PromptFailed)

    async def connect(self, path: str) -> asyncio.StreamReader:
        reader, self._writer = await asyncio.open_unix_connection(path)
        return reader

    async def listen(self, reader: asyncio.StreamReader) -> None:
        """Hand failures on, until the engine closes the connection."""
        while (failed := await _receive(reader, self._decoder)) is not None:
            self.on_failed(failed.key, failed.reason)

    def compute(self, key: str, token_ids: list[int], cache_salt: str) -> None:
        self._send(ComputePrompt(key, pack_tokens(token_ids), cache_salt))

    def stop(self, key: str) -> None:
        self._send(StopPrompt(key))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _send(self, message: Message) -> None:
        assert self._writer is not None, "connect() comes first"
        if not self._writer.is_closing():
            _send(self._writer, message)
