"""The transfer agent of a rank in its own process, under the orders of rank 0 (far_agent)."""

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tandem.runtime.errors import TandemError
from tandem.transfer.agents.agent import TransferAgent
from tandem.transfer.agents.orders import (
    AnyOrder,
    Checksum,
    Close,
    Connect,
    Disconnect,
    Done,
    Expect,
    Failed,
    Heard,
    Open,
    Prepare,
    Transfer,
    decode_order,
    receive,
    send,
)
from tandem.transfer.agents.rank_agent import Mark
from tandem.transfer.config import TransferConfig
from tandem.transfer.transport import KvMemory

logger = logging.getLogger(__name__)

HasPassed = Callable[[Mark], bool]  # this rank's device has passed the mark; from any thread

_END_S = 5.0  # of the thread, once the channel is shut: the process ends after it


@contextmanager
def serving_orders(channel: socket.socket, pool: KvMemory, has_passed: HasPassed) -> Iterator[None]:
    """Carry out the orders of `channel` on a thread while the body runs.

    The agent is closed at the end of the body or of the channel. An error of the body is one of the
    whole process, which is to end at once.
    """
    server = AgentServer(channel, pool, has_passed)

    def serve() -> None:
        try:
            asyncio.run(server.run())
        except Exception:
            logger.exception("the orders of rank 0")
            os._exit(1)  # rank 0 notices the end of the process, and can't go on without its KV

    thread = threading.Thread(target=serve, name="transfer-orders", daemon=True)
    thread.start()
    yield
    with suppress(OSError):  # rank 0 has closed it
        channel.shutdown(socket.SHUT_RDWR)
    thread.join(_END_S)


class AgentServer:
    """Owns the agent of `pool`, from the order that opens it to the end of `run`."""

    def __init__(self, channel: socket.socket, pool: KvMemory, has_passed: HasPassed) -> None:
        self._channel, self._pool, self._has_passed = channel, pool, has_passed
        self._agent: TransferAgent | None = None
        self._writer: asyncio.StreamWriter
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Carry out orders, each beside the others, until the channel is closed."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._channel)
        try:
            while (data := await receive(reader)) is not None:
                order = decode_order(data)
                if isinstance(order, Expect):
                    self._opened.expect(order.change)
                    continue
                task = asyncio.create_task(self._answer(order))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            if self._agent is not None:
                await self._agent.close()
            for task in self._tasks:  # their answers are for no one
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._writer.close()

    @property
    def _opened(self) -> TransferAgent:
        assert self._agent is not None, "an order before Open"
        return self._agent

    async def _answer(self, order: AnyOrder) -> None:
        try:
            result = await self._carry_out(order)
        except Exception as error:  # of any kind, or rank 0 would wait for ever
            if not isinstance(error, TandemError):
                logger.exception("an order of rank 0")
            message = error.message if isinstance(error, TandemError) else repr(error)
            send(self._writer, Failed(order.number, message))
        else:
            longest_s = 0.0 if self._agent is None else self._agent.longest_write_s
            send(self._writer, Done(order.number, result, longest_s))

    async def _carry_out(self, order: AnyOrder) -> Any:
        match order:
            case Open():
                return await self._open(order)
            case Connect():
                return await self._opened.connect(order.peer, order.metadata, order.grid)
            case Prepare():
                return await self._opened.prepare(order.peer, order.selection)
            case Disconnect():
                return await self._opened.disconnect(order.peer_instance)
            case Transfer():
                what = order.operation, order.peer, order.selection, order.pairs, order.notice
                return await self._opened.transfer(
                    *what,
                    checked=order.checked,
                    after=_Passing(order.after, self._has_passed),
                    post_before=order.post_before,
                )
            case Checksum():
                return await self._opened.checksums(order.block_ids, order.parts)
            case Close():
                if self._agent is not None:
                    await self._agent.close()

    async def _open(self, order: Open) -> tuple[bytes, int, int]:
        os.environ.update(order.environment)  # before the library reads it
        config = TransferConfig.model_validate_json(order.config)
        who = order.instance_id, order.epoch, order.rank
        agent = TransferAgent(config, order.layout, self._pool, *who)
        await agent.start(lambda data: send(self._writer, Heard(data)))
        self._agent = agent
        opened = agent.metadata()
        return opened.agent_metadata, opened.device_id, opened.base_address


@dataclass(frozen=True, slots=True)
class _Passing:
    """The event that this rank passes a mark."""

    mark: Mark
    has_passed: HasPassed

    def query(self) -> bool:
        return self.has_passed(self.mark)
