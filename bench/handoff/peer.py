"""The far end of measured transfers, in a process of its own, driven by JSON lines."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import msgspec
import uvloop

from tandem.bench.handoff.end import BareMetadata, End, PoolShape
from tandem.runtime.errors import TransferError
from tandem.runtime.local.child_process import PIPE, ChildProcess
from tandem.runtime.wire.cluster_messages import TransferMetadata
from tandem.transfer.agents.group import WriteOrder
from tandem.transfer.agents.link import Link

# Our agents hand on whatever is not the transfer room's own.
PING = b"PINGPING"  # answered on the event loop
LOOP_PING = b"LOOPPING"  # answered by the agent's poll loop
VERIFY = b"VERIFY"  # with block ids: answered with their checksums, computed at once
WROTE = b"WRITTEN!"  # tells that one of many writes has arrived
ANSWER_TIMEOUT_S = 120.0  # the first answer comes when torch is loaded and the pool is there


class Meet(msgspec.Struct, tag=True):
    """Connect to an end, by our agents and by the bare library; the far end's first line."""

    agents: TransferMetadata
    bare: BareMetadata


class Expect(msgspec.Struct, tag=True):
    """Count a handoff more or less under way, as a decode worker does."""

    change: int


class Receive(msgspec.Struct, tag=True):
    """Poll the bare library until so many messages have come; send them back if it `answers`."""

    message: bytes
    count: int
    answers: bool = False
    pause_s: float = 0.0  # between two polls


class Checksums(msgspec.Struct, tag=True):
    """Compute the checksums of whole blocks."""

    blocks: list[int]


class Write(msgspec.Struct, tag=True):
    """Write whole blocks to the near end, so many times at once; answered when that begins."""

    blocks: list[int]
    count: int


Command = Meet | Expect | Receive | Checksums | Write


class Answer(msgspec.Struct):
    """The answer to a command."""

    checksums: list[int] = []
    error: str = ""


class Peer:
    """The near end's handle of the far end."""

    def __init__(self, process: ChildProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def hello(self) -> Meet:
        return msgspec.json.decode(await self._line(), type=Meet)

    async def ask(self, command: Command) -> Answer:
        """Carry out a command there. Raises TransferError when it could not."""
        self.tell(command)
        return await self.answer()

    def tell(self, command: Command) -> None:
        """Begin a command; `answer` is owed."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(command) + b"\n")

    async def answer(self) -> Answer:
        answer = msgspec.json.decode(await self._line(), type=Answer)
        if answer.error:
            raise TransferError(f"the far end: {answer.error}")
        return answer

    async def _line(self) -> bytes:
        assert self._process.stdout is not None
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            line = await self._process.stdout.readline()
        if not line:
            raise TransferError("the far end of the measurement has ended")
        return line


@contextlib.asynccontextmanager
async def peer_process(shape: PoolShape) -> AsyncIterator[Peer]:
    """Run a far end with a pool of this shape while the body runs; it ends with this process."""
    shape_json = msgspec.json.encode(shape).decode()
    process = await ChildProcess.start_piped(
        [sys.executable, "-m", "tandem.bench.handoff.peer", shape_json],
        stdin=PIPE,
        stdout=PIPE,
        limit=1 << 24,
    )
    try:
        yield Peer(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


class _FarEnd:
    def __init__(self, end: End) -> None:
        self._end = end
        self._near = ""
        self._link: Link | None = None
        self._sending: set[asyncio.Task[None]] = set()

    def on_message(self, message: bytes) -> None:
        """Send a ping back, or checksums."""
        if message == PING:
            self._send(self._end.group.notify(self._near, PING))
        elif message.startswith(VERIFY):
            self._send(self._verify(msgspec.json.decode(message[len(VERIFY) :], type=list[int])))

    def _send(self, sending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(sending)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _verify(self, blocks: list[int]) -> None:
        checksums = msgspec.json.encode(await whole_checksums(self._end, blocks))
        await self._end.group.notify(self._near, VERIFY + checksums)

    async def do(self, command: Command) -> Answer:
        answer = Answer()
        match command:
            case Meet(agents=agents, bare=bare):
                self._near = agents.instance_id
                self._link = await self._end.group.connect(agents)
                assert self._end.bare is not None
                self._end.bare.connect(bare)
            case Expect(change=change):
                self._end.group.expect(change)
            case Receive():
                assert self._end.bare is not None
                self._end.bare.receive(
                    command.message, command.count, answers=command.answers, pause_s=command.pause_s
                )
            case Checksums(blocks=blocks):
                answer.checksums = await whole_checksums(self._end, blocks)
            case Write(blocks=blocks, count=count):
                for _ in range(count):
                    self._send(self._write(blocks))
        return answer

    async def _write(self, blocks: list[int]) -> None:
        group, link = self._end.group, self._link
        assert link is not None
        (ranks,) = link.rank_pairs
        pairs = [(block, block) for block in blocks]
        order = WriteOrder(ranks, range(group.layout.num_layers), pairs, lambda _: WROTE)
        await group.write(link, order)


async def whole_checksums(end: End, blocks: list[int]) -> list[int]:
    """Return the checksums of whole blocks of an end's pool."""
    group = end.group
    (ranks,) = group.layout.rank_pairs_from(1)
    return await group.checksums(ranks, range(group.layout.num_layers), blocks)


async def _serve(shape: PoolShape, out: int) -> None:
    end = End(shape, "far")
    far = _FarEnd(end)
    await end.start(far.on_message)
    try:
        _write(out, Meet(*end.metadata()))
        with end.answering(LOOP_PING, "near", lambda: True):
            while line := await asyncio.to_thread(sys.stdin.buffer.readline):
                try:
                    answer = await far.do(msgspec.json.decode(line, type=Command))
                except TransferError as error:
                    answer = Answer(error=error.message)
                _write(out, answer)
    finally:
        await end.close()


def _write(out: int, message: Any) -> None:
    os.write(out, msgspec.json.encode(message) + b"\n")


def main() -> None:
    """Serve until standard input ends."""
    out = os.dup(1)
    os.dup2(2, 1)  # the library prints to standard output at times
    uvloop.run(_serve(msgspec.json.decode(sys.argv[1], type=PoolShape), out))


if __name__ == "__main__":
    main()
