"""The agent of a rank in another process: rank 0 gives orders, and that process carries them out.

A GPU's memory can be opened to peers only by the process that has allocated it.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

from tandem.runtime.errors import TransferError
from tandem.runtime.wire.cluster_messages import RankMetadata
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
    decode_report,
    receive,
    send,
)
from tandem.transfer.agents.rank_agent import NO_NOTICE, Mark, MarkedEvent, Notice
from tandem.transfer.agents.reactor import PeerRank, Selection
from tandem.transfer.config import TransferConfig
from tandem.transfer.layout import KvLayout
from tandem.transfer.transport import BlockGrid, Event, Operation, Parts

_CLOSE_S = 5.0  # beyond a write's timeout: the longest close of an agent whose process answers


class OtherRanks(Protocol):
    """The processes of ranks 1 and up, each of which serves orders for its pool (agent_server)."""

    @property
    def order_channels(self) -> Sequence[socket.socket]:
        """The near ends, in the order of the ranks; their new owner closes them."""

    @property
    def ended_mark(self) -> Mark:
        """The mark of the last step that has ended at rank 0. From any thread."""


class FarAgent:
    """A RankAgent whose thread is in the process of its rank."""

    def __init__(
        self,
        config: TransferConfig,
        layout: KvLayout,
        ranks: OtherRanks,
        instance_id: str,
        epoch: str,
        rank: int,
    ) -> None:
        self._config, self._layout, self._ranks = config, layout, ranks
        self._who = instance_id, epoch, rank
        self._name = PeerRank(*self._who).agent_name
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}  # by the order's number
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._is_lost = False
        self._metadata: RankMetadata
        self.longest_write_s = 0.0

    async def start(self, on_notification: Callable[[bytes], None]) -> None:
        channel = self._ranks.order_channels[self._who[2] - 1]
        reader, self._writer = await asyncio.open_unix_connection(sock=channel)
        self._reading = asyncio.create_task(self._read(reader, on_notification))
        config = self._config.model_dump_json()
        ucx = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
        opened = await self._ask(Open, config, self._layout, *self._who, ucx)
        self._metadata = RankMetadata(*opened)

    async def close(self) -> None:
        """Close the agent and the channel, also of a process that answers no more."""
        reading, self._reading = self._reading, None
        if reading is None:
            return
        assert self._writer is not None
        try:
            async with asyncio.timeout(self._config.write_timeout_s + _CLOSE_S):
                await self._ask(Close)
        except (TransferError, TimeoutError):
            pass  # the process is gone or stands still, and those who started it end it
        self._writer.close()
        await reading

    def metadata(self) -> RankMetadata:
        return self._metadata

    def expect(self, change: int) -> None:
        if not self._is_lost:
            self._send(Expect(0, change))

    async def connect(self, peer: PeerRank, metadata: bytes, grid: BlockGrid) -> bool:
        return bool(await self._ask(Connect, peer, metadata, grid))

    async def prepare(self, peer: PeerRank, selection: Selection) -> None:
        await self._ask(Prepare, peer, selection)

    async def disconnect(self, peer_instance: str) -> None:
        await self._ask(Disconnect, peer_instance)

    async def transfer(
        self,
        operation: Operation,
        peer: PeerRank,
        selection: Selection,
        pairs: Sequence[tuple[int, int]],
        notice: Callable[[Sequence[int]], bytes] = NO_NOTICE,
        *,
        checked: Parts | None = None,
        after: Event | None = None,
        post_before: float | None = None,
    ) -> bytes:
        """Have the rank move blocks. `notice` is a Notice, and `after` a MarkedEvent or None.

        None: what rank 0 has computed by now is what is written, and the rank is to have done so.
        """
        assert isinstance(notice, Notice), "it is filled in elsewhere"
        if after is None:
            mark = self._ranks.ended_mark
        else:
            assert isinstance(after, MarkedEvent), "an event of this process means nothing there"
            mark = after.mark
        what = operation, peer, selection, pairs, notice
        sent: bytes = await self._ask(Transfer, *what, checked, mark, post_before)
        return sent

    async def checksums(self, block_ids: Sequence[int], parts: Parts) -> list[int]:
        sums: list[int] = await self._ask(Checksum, block_ids, parts)
        return sums

    async def _ask(self, order: Callable[..., AnyOrder], *fields: object) -> Any:
        if self._is_lost or self._writer is None:
            raise TransferError(f"transfer agent {self._name} is not running")
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(order(number, *fields))
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)

    def _send(self, order: AnyOrder) -> None:
        assert self._writer is not None, "start() comes first"
        send(self._writer, order)

    async def _read(
        self, reader: asyncio.StreamReader, on_notification: Callable[[bytes], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        while (data := await receive(reader)) is not None:
            match decode_report(data):
                case Heard(data=message):
                    loop.call_soon(on_notification, message)  # its errors are the loop's
                case Done(number=number, result=result, longest_write_s=longest_write_s):
                    self.longest_write_s = longest_write_s
                    if (answer := self._awaited(number)) is not None:
                        answer.set_result(result)
                case Failed(number=number, message=message):
                    if (answer := self._awaited(number)) is not None:
                        answer.set_exception(TransferError(message))
        self._is_lost = True
        for number in list(self._waiting):
            if (answer := self._awaited(number)) is not None:
                answer.set_exception(TransferError(f"the process of {self._name} has ended"))

    def _awaited(self, number: int) -> asyncio.Future[Any] | None:
        """Return the future of an order's answer; None: its caller waits no more."""
        answer = self._waiting.get(number)
        return None if answer is None or answer.done() else answer
